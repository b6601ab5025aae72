"""A plugin: the environment `dice` and the tool `roll`."""

import random
from collections.abc import Mapping
from typing import Any

from agentrl import ToolEnv, ToolError, Trajectory, tool
from agentrl.types import Observation


@tool
async def roll(sides: int, seed: int) -> int:
    """Roll a die.

    Args:
        sides: how many sides it has, 2 to 100.
        seed: which roll; the same seed rolls the same.
    """
    if not 2 <= sides <= 100:
        raise ToolError(f"no die has {sides} sides; 2 to 100")
    return random.Random(seed).randint(1, sides)


class Dice(ToolEnv):
    """What does a die show? It must be rolled to know."""

    system_prompt = "Answer with \\boxed{}."
    tools = ("roll",)

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        rng = random.Random(f"{seed}/{(options or {}).get('split', 'train')}")
        self.sides, self.seed = rng.choice([6, 20, 100]), rng.randint(0, 999)
        return self.ask(f"What does roll {self.seed} of a die with {self.sides} sides show?"), {}

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        shown = random.Random(self.seed).randint(1, self.sides)
        return {"correct": float(f"\\boxed{{{shown}}}" in trajectory.answer)}
