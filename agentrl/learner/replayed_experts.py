"""The experts of a row's tokens that an engine's routers chose, as arrays: of the tokens of which it says them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.types import Sample

ExpertIds = NDArray[np.uint8] | NDArray[np.uint16]
_EXPERTS_BIT = 1 << 31  # in every hash: no key of a row with experts is that of one without


@dataclass(frozen=True, eq=False)
class ReplayedExperts:
    """The experts of a row.

    known   (tokens,) bool                     the tokens whose experts are known
    chosen  (known tokens, layers, top_k)      numbers of experts, 8 or 16 bits
    """

    known: NDArray[np.bool_]
    chosen: ExpertIds

    @classmethod
    def read(cls, sample: Sample) -> ReplayedExperts | None:
        """Read those of a sample; None where it has none. Of a token that is said twice the last one counts.

        Raises:
            ValueError: they are of tokens that it has not, or of several models.
        """
        said = [(place, routed) for place, routed in sample.routed_experts if len(routed)]
        if not said:
            return None
        sizes = {(routed.layers, routed.top_k) for _, routed in said}
        if len(sizes) > 1:
            raise ValueError(f"the experts of one row are of several models: (layers, top_k) {sorted(sizes)}")
        tokens = len(sample.token_ids)
        ((layers, top_k),) = sizes
        wide = any(routed.experts.typecode == "H" for _, routed in said)
        experts = np.zeros((tokens, layers, top_k), np.uint16 if wide else np.uint8)
        known = np.zeros(tokens, np.bool_)
        for place, routed in said:
            if place < 0 or place + len(routed) > tokens:
                raise ValueError(f"experts of tokens {place} to {place + len(routed)} in a row of {tokens}")
            own = np.frombuffer(routed.experts, np.dtype(routed.experts.typecode))
            experts[place : place + len(routed)] = own.reshape(len(routed), layers, top_k)
            known[place : place + len(routed)] = True
        return cls(known, experts[known])

    def hash_tokens(self) -> NDArray[np.int64]:
        """Compute a number of 32 bits for the experts of each token, (tokens,): the highest is set, and 31 vary."""
        flat = np.sort(self.chosen, -1).reshape(len(self.chosen), -1)  # a set, in whatever order it was said
        factors = np.random.default_rng(0).integers(1, 1 << 63, flat.shape[1], dtype=np.uint64) | np.uint64(1)
        hashes = np.full(len(self.known), _EXPERTS_BIT, np.int64)
        own = ((flat.astype(np.uint64) + np.uint64(1)) * factors).sum(1, dtype=np.uint64)  # modulo 2**64
        hashes[self.known] |= (own >> np.uint64(33)).astype(np.int64)
        return hashes
