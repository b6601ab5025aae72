"""A row as the learner has it: a sample's lists as arrays, which are sent, sorted and compared as they are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from agentrl.learner.replayed_experts import ReplayedExperts
from agentrl.types import Sample

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class RowArrays:
    """A row.

    token_ids   (tokens,)
    loss_mask   (tokens,)    the trained ones
    logprobs    (trained,)   the engine's; nan where none sampled the token
    advantages  (trained,)
    kept        the set that each trained token was drawn among, or None; empty for all None
    starts      the places at which its contexts begin
    experts     those that the engine's routers chose, where it says them; None where it says none
    """

    token_ids: Int32
    loss_mask: Bool
    logprobs: Float32
    advantages: Float32
    kept: Sequence[array[int] | None] = ()
    starts: tuple[int, ...] = (0,)
    experts: ReplayedExperts | None = None

    @classmethod
    def read(cls, sample: Sample) -> RowArrays:
        """Make it of a sample.

        Raises:
            ValueError: its lists are not of one length.
        """
        names = ("token_ids", "loss_mask", "logprobs", "advantages", *["kept"] * bool(sample.kept))
        lengths = {name: len(getattr(sample, name)) for name in names}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{length} of {name}" for name, length in lengths.items())
            raise ValueError(f"a Sample's lists have one entry a token; one has {said}")
        mask = np.array(sample.loss_mask, np.bool_)
        logprobs, advantages = (np.array(v, np.float32)[mask] for v in (sample.logprobs, sample.advantages))
        kept = [sample.kept[place] for place in np.flatnonzero(mask).tolist()] if sample.kept else ()
        ids, experts = np.array(sample.token_ids, np.int32), ReplayedExperts.read(sample)
        return cls(ids, mask, logprobs, advantages, kept, tuple(sample.starts), experts)

    @property
    def contexts(self) -> list[Int32]:
        """Split the tokens into contexts."""
        return [self.token_ids[a:b] for a, b in self._spans]

    @cached_property
    def keys(self) -> Int32 | Int64:
        """Return numbers that are equal where rows may share a token: its id, and the experts that it is sent to.

        The experts are a hash in which 31 bits vary, so that of pairs that differ in nothing else one in 2**31 is
        shared.
        """
        if self.experts is None:
            return self.token_ids
        return self.token_ids.astype(np.int64) << 32 | self.experts.hash_tokens()

    @property
    def context_keys(self) -> list[Int32 | Int64]:
        """Split ``keys`` into contexts."""
        return [self.keys[a:b] for a, b in self._spans]

    @property
    def _spans(self) -> list[tuple[int, int]]:
        return list(pairwise([*self.starts, len(self.token_ids)]))

    @property
    def trained(self) -> int:
        """Count the trained tokens."""
        return len(self.logprobs)
