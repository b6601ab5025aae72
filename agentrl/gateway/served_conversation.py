"""A conversation of somebody's client with a policy that is served: its turns, and what is recorded of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from agentrl.rollout.threads.conversation import Digest
from agentrl.rollout.threads.forest import ThreadForest
from agentrl.types import Stop, Trajectory


@dataclass(eq=False)
class ServedConversation:
    """One conversation, or all those that a client gave one name.

    Args:
        number: in the order in which they began.
        name: that the client gave; empty: none.
        opening: that its first request is; None: it has a name.
        ends: what its turns end, by which it is found again.
        answering: requests that are being answered.
        since: when it was last asked or answered, by the run's clock.
    """

    number: int
    forest: ThreadForest
    name: str = ""
    began: float = 0.0
    since: float = 0.0
    opening: Digest | None = None
    ends: list[Digest] = field(default_factory=list)
    answering: int = 0
    seconds: float = 0.0  # of the engine, concurrent requests together
    temperature: float | None = None  # of the last turn
    requests: Counter[str] = field(default_factory=Counter)  # by their dialects

    def build_trajectory(self) -> Trajectory:
        """Return what it came to: an episode that nobody scores."""
        played = self.forest.collect()
        main = self.forest.find_main()
        last = max((t for t in self.forest.threads if t.turns), key=lambda t: t.turns[-1])
        return Trajectory(
            task=self.number,
            segments=tuple(played.segments),
            messages=tuple(main.messages),
            stop=Stop.MAX_TOKENS if last.is_cut else Stop.TERMINATED,
            step_rewards=tuple(0.0 for _ in played.order),
            timings={"generate": self.seconds, "total": self.since - self.began},
            threads=played.threads,
            info={"requests": dict(self.requests)} | ({"name": self.name} if self.name else {}),
            temperature=self.temperature,
        )
