"""The rules of sampling that the learner follows too, so that its distribution is the one that was sampled from.

The set that a token was drawn among was fixed when it was sampled, and is held through all updates: a set that followed
the policy could lose the token. The repetition penalty is a function of the row's context, which stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from agentrl.models.kept_tokens import decode_kept, penalize_repetition
from agentrl.types import Sample


@dataclass(frozen=True)
class SamplingRules:
    """The rules by which each trained token of some rows was sampled, beside the temperature.

    Args:
        trained: row and position of each trained token.
        repetition_penalty: of the tokens before it in its row.
    """

    rows: Sequence[Sample]
    trained: Sequence[tuple[int, int]]
    repetition_penalty: float = 1.0
    _first_seen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)

    def penalize(self, logits: Tensor, first: int) -> Tensor:
        """Apply the repetition penalty to logits, (tokens, vocabulary), of the trained tokens from ``first`` on."""
        if self.repetition_penalty == 1.0:
            return logits
        seen, at = torch.zeros_like(logits, dtype=torch.bool), 0
        for row, group in groupby(self.trained[first : first + len(logits)], key=lambda place: place[0]):
            positions = torch.tensor([position for _, position in group], device=logits.device)
            tokens, starts = (t.to(logits.device) for t in self._find_first_seen(row, logits.shape[1]))
            seen[at : at + len(positions), tokens] = starts < positions[:, None]
            at += len(positions)
        return penalize_repetition(logits, seen, self.repetition_penalty)

    def _find_first_seen(self, row: int, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Return the distinct tokens of a row, and the first position of each."""
        if row not in self._first_seen:
            first: dict[int, int] = {}
            for position, token in enumerate(self.rows[row].token_ids):
                if token < vocabulary:
                    first.setdefault(token, position)
            self._first_seen[row] = torch.tensor(list(first)), torch.tensor(list(first.values()))
        return self._first_seen[row]

    def mark_kept(self, logits: Tensor, first: int) -> Tensor | None:
        """Mark the sets of the trained tokens from ``first`` on, as wide as the logits; None where all are kept."""
        places = self.trained[first : first + len(logits)]
        sets = [self.rows[row].kept[position] if self.rows[row].kept else None for row, position in places]
        if all(one is None for one in sets):
            return None
        return decode_kept(sets, logits.shape[1], logits.device)
