"""The rules of sampling that the learner follows too, so that its distribution is the one that was sampled from.

The set that a token was drawn among was fixed when it was sampled, and is held through all updates: a set that followed
the policy could lose the token. The repetition penalty is a function of the token's context, which stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from agentrl.learner.packing import MicroBatch
from agentrl.models.device_copy import copy_to_device
from agentrl.models.kept_tokens import decode_kept, find_penalties


@dataclass(frozen=True)
class SamplingRules:
    """The rules by which each trained token of a micro-batch was sampled, beside the temperature.

    Args:
        repetition_penalty: of the tokens before one in its context.
    """

    batch: MicroBatch
    repetition_penalty: float = 1.0
    _first_seen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)

    def find_penalties(self, logits: Tensor, first: int) -> Tensor | None:
        """Find the factors of logits, (tokens, vocabulary), of the trained tokens from ``first`` on; None for none."""
        if self.repetition_penalty == 1.0:
            return None
        seen, at = torch.zeros_like(logits, dtype=torch.bool), 0
        contexts, places = self.batch.trained[first : first + len(logits)].T
        for context in np.unique(contexts).tolist():
            own = torch.from_numpy(places[contexts == context])
            positions, tokens, starts = (
                copy_to_device(t, logits.device) for t in (own, *self._find_first_seen(context, logits.shape[1]))
            )
            seen[at : at + len(positions), tokens] = starts < positions[:, None]
            at += len(positions)
        return find_penalties(logits, seen, self.repetition_penalty)

    def _find_first_seen(self, context: int, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Return the distinct tokens of a context, and the first position of each."""
        if context not in self._first_seen:
            tokens, positions = np.unique(self.batch.contexts[context], return_index=True)
            known = tokens < vocabulary
            first = torch.from_numpy(tokens[known].astype(np.int64)), torch.from_numpy(positions[known])
            self._first_seen[context] = first
        return self._first_seen[context]

    def mark_kept(self, logits: Tensor, first: int) -> Tensor | None:
        """Mark the sets of the trained tokens from ``first`` on, as wide as the logits; None where all are kept."""
        sets = self.batch.kept[first : first + len(logits)]
        if all(one is None for one in sets):
            return None
        return decode_kept(sets, logits.shape[1], logits.device)
