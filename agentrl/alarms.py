"""Silence is an alarm too: what is wrong with a run though nothing fails."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.dead_end import DeadEnd, describe
from agentrl.types import Group, Trajectory

STEPS = 3  # in a row, before a constant reward or the absence of calls is told
# How calls look that no parser of ours has read.
MISSED = re.compile(
    r"<tool_call|<function=|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call|\"name\"\s*:\s*\"[^\"]+\"\s*,\s*\"(?:arguments|parameters)\""
)


@dataclass
class Alarms:
    """Looks at each step's episodes; tells each kind of silence once."""

    tools: bool  # whether the model is offered any
    env: str = "ENV"  # these three as the command line names them
    model: str = "MODEL"
    run: str = "RUN"
    told: set[str] = field(default_factory=set)
    _quiet: int = 0  # steps without a call
    _same: DeadEnd = field(default_factory=DeadEnd)  # of the steps with one and the same reward
    _reward: float | None = None

    def look(self, groups: Sequence[Group]) -> list[str]:
        """What is new, in sentences."""
        fair = [t for g in groups for t in g if t.fault is None]
        found = [*self._calls(fair), *self._rewards(fair), *self._missed(fair)]
        new = [text for kind, text in found if kind not in self.told]
        self.told |= {kind for kind, _ in found}
        return new

    def _calls(self, fair: Sequence[Trajectory]) -> list[tuple[str, str]]:
        called = any(t.calls for t in fair)
        self._quiet = 0 if called or not fair else self._quiet + 1
        if not self.tools or self._quiet < STEPS:
            return []
        return [("no calls", f"tools are offered, and no call was made in {STEPS} steps ({len(fair)} episodes each)")]

    def _rewards(self, fair: Sequence[Trajectory]) -> list[tuple[str, str]]:
        rewards = {t.reward for t in fair if t.reward is not None}
        if len(rewards) != 1 or rewards != {self._reward}:
            self._same = DeadEnd()
        self._reward = rewards.pop() if len(rewards) == 1 else None
        if self._reward is None:
            return []
        self._same.add(fair)
        if self._same.steps < STEPS:
            return []
        names = {"env": self.env, "model": self.model, "run": self.run}
        return [("constant reward", describe(self._reward, self._same, tools=self.tools, **names))]

    def _missed(self, fair: Sequence[Trajectory]) -> list[tuple[str, str]]:
        if not self.tools:
            return []
        texts = [m["content"] for t in fair for m in t.messages if m["role"] == "assistant" and not m.get("tool_calls")]
        hits = [found for text in texts if (found := MISSED.search(text))]
        if len(hits) < max(8, len(texts) // 20):
            return []
        around = hits[0].string[max(hits[0].start() - 20, 0) : hits[0].end() + 60]
        return [("missed calls", f"{len(hits)} of {len(texts)} turns look like calls that were not read: {around!r}")]
