"""A plugin: the environment `dice` and the tool `roll`."""

import random
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from agentrl_envs.rewards import extract_boxed, is_same_answer

from agentrl import Message, ToolCall, ToolEnv, ToolError, Trajectory, tool
from agentrl.types import ExpertTurn, Observation


def shown(sides: int, number: int) -> int:
    """What the die shows at that roll."""
    return random.Random(number).randint(1, sides)


@tool
async def roll(sides: int, number: int) -> int:
    """Roll a die.

    Args:
        sides: how many sides it has, 2 to 10000.
        number: which roll; the same one shows the same.
    """
    if not 2 <= sides <= 10000:
        raise ToolError(f"no die has {sides} sides; 2 to 10000")
    return shown(sides, number)


class Dice(ToolEnv):
    """What does a die show? It must be rolled to know."""

    system_prompt = "Answer with \\boxed{}."
    tools = ("roll",)

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        split = (options or {}).get("split", "train")
        rng = random.Random(f"{seed}/{split}")
        # No task is in both splits: odd rolls are held out for the test.
        self.sides, self.number = rng.choice([100, 1000, 10000]), rng.randrange(int(split == "test"), 10000, 2)
        return self.ask(f"What does roll {self.number} of a die with {self.sides} sides show?"), {}

    async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
        """Roll it, and answer what the tool said."""
        told = yield ToolCall.of("roll", sides=self.sides, number=self.number)
        yield f"\\boxed{{{told[-1]['content']}}}"

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        answer = extract_boxed(trajectory.answer)
        return {"correct": float(answer is not None and is_same_answer(answer, str(shown(self.sides, self.number))))}
