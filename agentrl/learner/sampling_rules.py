"""The rules of sampling that the learner follows too, so that its distribution is the one that was sampled from.

The set that a token was drawn among was fixed when it was sampled, and is held through all updates: a set that followed
the policy could lose the token. The repetition penalty is a function of the token's context, which stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

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
        for context, group in groupby(self.batch.trained[first : first + len(logits)], key=lambda place: place[0]):
            positions, tokens, starts = (
                copy_to_device(t, logits.device)
                for t in (torch.tensor([p for _, p in group]), *self._find_first_seen(context, logits.shape[1]))
            )
            seen[at : at + len(positions), tokens] = starts < positions[:, None]
            at += len(positions)
        return find_penalties(logits, seen, self.repetition_penalty)

    def _find_first_seen(self, context: int, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Return the distinct tokens of a context, and the first position of each."""
        if context not in self._first_seen:
            first: dict[int, int] = {}
            for position, token in enumerate(self.batch.contexts[context]):
                if token < vocabulary:
                    first.setdefault(token, position)
            self._first_seen[context] = torch.tensor(list(first)), torch.tensor(list(first.values()))
        return self._first_seen[context]

    def mark_kept(self, logits: Tensor, first: int) -> Tensor | None:
        """Mark the sets of the trained tokens from ``first`` on, as wide as the logits; None where all are kept."""
        sets = self.batch.kept[first : first + len(logits)]
        if all(one is None for one in sets):
            return None
        return decode_kept(sets, logits.shape[1], logits.device)
