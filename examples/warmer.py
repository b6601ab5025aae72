"""Rewards of single steps, credit turn by turn, branches, and a curriculum.

Run it: agentrl train --env examples/warmer.py:Warmer --rollout.curriculum examples/warmer.py:harder
            --learner.advantage gigpo --rollout.branches 2 --steps 20
"""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl import Env, Reply, Step
from agentrl.environments.curriculum import Outcome
from agentrl.types import Observation


class Warmer(Env):
    """Guess a number: each guess is worth how much nearer it came."""

    max_turns = 4

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self.size = 10 ** (options or {}).get("digits", 1)
        self.number, self.off = seed * 7919 % self.size, 1.0
        return f"Guess a number from 0 to {self.size - 1}.", {}

    async def step(self, action: Reply) -> Step:
        found = re.findall(r"\d+", action.content)
        off = min(abs(int(found[-1][:9]) - self.number) / self.size, 1.0) if found else 1.0
        nearer, self.off = self.off - off, off
        said = "right" if off == 0 else "warmer" if nearer > 0 else "colder"
        return Step(f"You are {said}. Guess again.", nearer, off == 0, False, {})

    def clone(self) -> Env:
        """What ``rollout.branches`` asks for: nothing here is shared with anybody."""
        return copy.deepcopy(self)


def harder(history: Sequence[Outcome]) -> dict[str, Any]:
    """Two digits, once one digit is easy."""
    rewards = [o.reward for o in history[-32:] if o.reward is not None]
    return {"digits": 2 if len(rewards) == 32 and min(rewards) > 0.8 else 1}
