"""Signs of trouble while a run goes on: each is told once, and again where it came back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.health import WINDOW, History, Values, find_signs
from agentrl.types import Group, final_text


@dataclass
class Diagnosis:
    """Looks at each step; tells each sign once, and again where it came back after it was gone for long.

    Args:
        weights: of the reward's parts; 1.0 for one that is not named.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)  # one a step; the first WINDOW, and the last 2 WINDOW
    _seen: dict[str, int] = field(default_factory=dict)  # the step a sign was last there
    _step: int = 0

    def look(self, values: Values, groups: Sequence[Group]) -> list[str]:
        """What is new, in sentences."""
        self._step += 1
        self.history.append({k: v for k, v in values.items() if v == v})
        del self.history[WINDOW : -2 * WINDOW]
        new = []
        for name, text in find_signs(History(self.history, self._step, self.weights)).items():
            if self._step - self._seen.get(name, -10 * WINDOW) > 2 * WINDOW:
                new.append(text)
            self._seen[name] = self._step
        if (same := same_answers(groups)) is not None:
            if "same answers" not in self._seen:
                new.append(same)
            self._seen["same answers"] = self._step
        return new


def same_answers(groups: Sequence[Group]) -> str | None:
    """Winners of different tasks that all say the same: a reward that can be had without the task."""
    rewards = [t.reward for g in groups for t in g if t.reward is not None]
    if not rewards or max(rewards) == min(rewards):
        return None
    best = max(rewards)
    said = Counter(
        text for g in groups for text in {final_text(t.messages).strip() for t in g if t.reward == best} if text
    )
    winners = sum(1 for g in groups if any(t.reward == best for t in g))
    if not said or winners < 8:
        return None
    text, count = said.most_common(1)[0]
    if count < winners / 2:
        return None
    return (
        f"the winners of {count} of {winners} tasks say the same, {text[:60]!r}: can the reward be had without the "
        "task? docs/rewards.md tells of gaming"
    )
