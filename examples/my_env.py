"""An environment of your own: tasks from a seed, a tool with state, a reward of named parts.

Run it: agentrl train --env examples/my_env.py:Ledger --steps 20
"""

import random
from collections.abc import Mapping
from typing import Any

from agentrl_envs.rewards import extract_boxed, is_same_answer

from agentrl import ToolEnv, Trajectory, tool
from agentrl.types import Observation


class Ledger(ToolEnv):
    """What two accounts hold together; the balances are behind a tool."""

    system_prompt = "Answer with \\boxed{}."
    tools = ("calculator",)
    max_turns = 6
    reward_weights = {"correct": 1.0, "looked_up": 0.0}  # a weight of 0 is logged, and teaches nothing

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        split = (options or {}).get("split", "train")
        rng = random.Random(f"{seed}/{split}")
        one, other = rng.sample(["hat", "lamp", "pen", "cup", "book", "map"], 2)
        self.balances = {one: rng.randint(2, 999), other: rng.randint(2, 999)}
        # No question is in both splits: they ask for other numbers of pieces.
        counts = rng.randint(2, 9), rng.randint(10, 19) if split == "test" else rng.randint(2, 9)
        self.answer = counts[0] * self.balances[one] + counts[1] * self.balances[other]
        return self.ask(f"What do {counts[0]} {one}s and {counts[1]} {other}s cost?"), {}

    @tool
    async def price(self, item: str) -> int:
        """The price of an item.

        Args:
            item: its name.
        """
        self.looked_up = True
        return self.balances.get(item.removesuffix("s"), 0)

    looked_up = False

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        answer = extract_boxed(trajectory.answer)
        correct = answer is not None and is_same_answer(answer, str(self.answer))
        return {"correct": float(correct), "looked_up": float(self.looked_up)}
