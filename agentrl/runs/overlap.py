"""Prompts that a run was both trained on and measured with: where there are some, not all that is measured is new."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from agentrl.types import Trajectory


@dataclass
class Overlap:
    """The different prompts of a run, as digests of their tokens: eight bytes each."""

    trained: set[int] = field(default_factory=set)
    held_out: set[int] = field(default_factory=set)
    reported: int = 0  # prompts in both, when that was said last

    def train(self, episodes: Iterable[Trajectory]) -> None:
        self.trained.update(digest(t) for t in episodes if t.segments)

    def hold_out(self, episodes: Iterable[Trajectory]) -> None:
        self.held_out.update(digest(t) for t in episodes if t.segments)

    def counts(self) -> dict[str, int]:
        """Return how many different prompts are held out, and how many of those were trained on too."""
        return {"held_out": len(self.held_out), "also_trained": len(self.trained & self.held_out)}

    def look(self) -> list[str]:
        """Return a sentence on the prompts in both splits where there are more than were said before.

        Where all held-out tasks begin with the same prompt, a prompt does not tell tasks apart, and nothing is said.
        """
        both, held_out = len(self.trained & self.held_out), len(self.held_out)
        if both <= self.reported or held_out < 2:
            return []
        self.reported = both
        return [
            f"{both} of {held_out} held-out prompts were trained on too: what is measured is not all unseen. Choose "
            'tasks by options["split"] in reset, and give each split its own rows'
        ]


def digest(trajectory: Trajectory) -> int:
    """Return 64 bits of the first prompt's tokens."""
    tokens = array("q", trajectory.segments[0].token_ids).tobytes()
    return int.from_bytes(blake2b(tokens, digest_size=8).digest(), "big")
