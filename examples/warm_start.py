"""A warm start, then reinforcement learning: an environment of your own with an expert.

Run it: python examples/warm_start.py
"""

import random
from collections.abc import AsyncGenerator
from typing import Any

from agentrl import Message, ToolCall, ToolEnv, Trajectory, sft, train
from agentrl.types import ExpertTurn


class Change(ToolEnv):
    """The change from a note, which a calculator knows."""

    system_prompt = "Answer with \\boxed{}."
    tools = ["calculator"]

    async def reset(self, *, seed: int, options: Any = None) -> tuple[Any, dict[str, Any]]:
        rng = random.Random(seed)
        self.note, self.cost = rng.randrange(100, 1000), rng.randrange(11, 100)
        return self.ask(f"I pay {self.cost} with a note of {self.note}. What do I get back?"), {}

    async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
        (result,) = yield ToolCall.of("calculator", expression=f"{self.note}-{self.cost}")
        yield f"The answer is \\boxed{{{result['content']}}}."

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"correct": float(f"\\boxed{{{self.note - self.cost}}}" in trajectory.answer)}


def main(steps: int = 20, warm: int = 8) -> None:
    started = sft(Change, steps=warm, sft={"batch_size": 8})
    print(f"after {warm} steps of imitation: {started.summary['reward_after']:.3f}")
    run = train(Change, str(started.folder), steps=steps)
    print(f"held-out reward: {run.summary['reward_before']:.3f} -> {run.summary['reward_after']:.3f}")


if __name__ == "__main__":
    main()
