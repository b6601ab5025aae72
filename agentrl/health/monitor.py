"""The monitor of a run that goes on. It reports each sign of trouble once, and again if it comes back much later.

Signs in the metrics are found by ``signs``. Some things fail quietly, and only the episodes show them: tools that are
never called, a reward that never changes, calls that no parser reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.health.dead_end import DeadEnd, explain_dead_end
from agentrl.health.signs import WINDOW, History, Values, find_signs
from agentrl.health.tool_use import find_call_form, list_turns_without_calls
from agentrl.types import Group, Trajectory, get_final_text

STEPS = 3  # in a row, before a constant reward or the absence of calls is reported
_GONE = 2 * WINDOW  # steps without a sign, after which it is reported again


@dataclass
class HealthMonitor:
    """The health of one training run. It is a part of a checkpoint.

    Args:
        tools: the model is offered tools.
        env, model, run: as the command line names them.
        weights: of the reward components; 1.0 for one that is not named.
    """

    tools: bool = False
    env: str = "ENV"
    model: str = "MODEL"
    run: str = "RUN"
    weights: Mapping[str, float] = field(default_factory=dict)
    _history: list[dict[str, float]] = field(default_factory=list)  # one a step; the first WINDOW, and the last two
    _step: int = 0
    _last_seen: dict[str, int] = field(default_factory=dict)  # the step of each sign
    _reported: set[str] = field(default_factory=set)  # signs in the episodes
    _steps_without_calls: int = 0
    _constant: DeadEnd = field(default_factory=DeadEnd)  # of the steps with one and the same reward
    _reward: float | None = None

    def check_episodes(self, groups: Sequence[Group]) -> list[str]:
        """Return a sentence for each sign that a step's episodes show for the first time."""
        valid = [t for g in groups for t in g if t.fault is None]
        signs = {**self._find_no_calls(valid), **self._find_constant_reward(valid), **self._find_unread_calls(valid)}
        new = [text for name, text in signs.items() if name not in self._reported]
        self._reported |= signs.keys()
        return new

    def check_step(self, values: Values, groups: Sequence[Group]) -> list[str]:
        """Return a sentence for each sign that a step's metrics, or its winners, show newly."""
        self._step += 1
        self._history.append({k: v for k, v in values.items() if v == v})
        del self._history[WINDOW : -2 * WINDOW]
        new = []
        for name, text in find_signs(History(self._history, self._step, self.weights)).items():
            if self._step - self._last_seen.get(name, -10 * WINDOW) > _GONE:
                new.append(text)
            self._last_seen[name] = self._step
        if (same := _find_same_answers(groups)) is not None:
            if "same answers" not in self._last_seen:
                new.append(same)
            self._last_seen["same answers"] = self._step
        return new

    def _find_no_calls(self, valid: Sequence[Trajectory]) -> dict[str, str]:
        called = any(t.calls for t in valid)
        self._steps_without_calls = 0 if called or not valid else self._steps_without_calls + 1
        if not self.tools or self._steps_without_calls < STEPS:
            return {}
        return {"no calls": f"tools are offered, and no call was made in {STEPS} steps ({len(valid)} episodes each)"}

    def _find_constant_reward(self, valid: Sequence[Trajectory]) -> dict[str, str]:
        rewards = {t.reward for t in valid if t.reward is not None}
        if len(rewards) != 1 or rewards != {self._reward}:
            self._constant = DeadEnd()
        self._reward = rewards.pop() if len(rewards) == 1 else None
        if self._reward is None:
            return {}
        self._constant.add(valid)
        if self._constant.steps < STEPS:
            return {}
        names = {"env": self.env, "model": self.model, "run": self.run}
        return {"constant reward": explain_dead_end(self._reward, self._constant, tools=self.tools, **names)}

    def _find_unread_calls(self, valid: Sequence[Trajectory]) -> dict[str, str]:
        if not self.tools:
            return {}
        texts = list_turns_without_calls(valid)
        matches = [found for text in texts if (found := find_call_form(text))]
        if len(matches) < max(8, len(texts) // 20):
            return {}
        around = matches[0][1]
        return {"missed calls": f"{len(matches)} of {len(texts)} turns look like calls that were not read: {around!r}"}


def _find_same_answers(groups: Sequence[Group]) -> str | None:
    """Report winners of different tasks that all say the same: a reward that can be had without the task."""
    rewards = [t.reward for g in groups for t in g if t.reward is not None]
    if not rewards or max(rewards) == min(rewards):
        return None
    best = max(rewards)
    answers = Counter(
        text for g in groups for text in {get_final_text(t.messages).strip() for t in g if t.reward == best} if text
    )
    winners = sum(1 for g in groups if any(t.reward == best for t in g))
    if not answers or winners < 8:
        return None
    text, count = answers.most_common(1)[0]
    if count < winners / 2:
        return None
    return (
        f"the winners of {count} of {winners} tasks say the same, {text[:60]!r}: can the reward be had without the "
        "task? docs/rewards.md explains reward gaming"
    )
