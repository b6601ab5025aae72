"""The overlap of prompts that a run trains on and evaluates on: those held-out tasks are not unseen."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from agentrl.types import Trajectory


@dataclass
class PromptOverlap:
    """The different prompts of a run, as digests of their tokens: eight bytes each."""

    trained: set[int] = field(default_factory=set)
    held_out: set[int] = field(default_factory=set)
    reported: int = 0  # prompts in both, at the last warning

    def add_trained(self, episodes: Iterable[Trajectory]) -> None:
        self.trained.update(_digest(t) for t in episodes if t.segments)

    def add_held_out(self, episodes: Iterable[Trajectory]) -> None:
        self.held_out.update(_digest(t) for t in episodes if t.segments)

    def counts(self) -> dict[str, int]:
        """Return how many different prompts are held out, and how many of those were trained on too."""
        return {"held_out": len(self.held_out), "also_trained": len(self.trained & self.held_out)}

    def new_warnings(self) -> list[str]:
        """Return a sentence if there are more prompts in both splits than at the last warning.

        If all held-out tasks begin with the same prompt, a prompt does not identify a task, and there is no warning.
        """
        both, held_out = len(self.trained & self.held_out), len(self.held_out)
        if both <= self.reported or held_out < 2:
            return []
        self.reported = both
        return [
            f"{both} of {held_out} held-out prompts were trained on too: what is measured is not all unseen. Choose "
            'tasks by options["split"] in reset, and give each split its own rows'
        ]


def _digest(trajectory: Trajectory) -> int:
    """Return 64 bits of the first prompt's tokens."""
    tokens = array("q", trajectory.segments[0].token_ids).tobytes()
    return int.from_bytes(blake2b(tokens, digest_size=8).digest(), "big")
