"""A tool of your own: async, with a deadline, retries and a limit, so that slow and flaky ones do no harm.

Run it: agentrl train --env examples/my_tool.py:Convert --steps 3
"""

import random
from collections.abc import Mapping
from typing import Any

import anyio
from agentrl_envs.rewards import extract_boxed, is_same_answer

from agentrl import ToolEnv, ToolError, Trajectory, tool
from agentrl.types import Observation

PER_METRE = {"feet": 3.28084, "inches": 39.3701, "yards": 1.09361}


@tool(timeout_s=2.0, retries=1, max_concurrency=32)
async def convert(metres: float, unit: str) -> float:
    """Convert a length.

    Args:
        metres: the length.
        unit: feet, inches or yards.
    """
    await anyio.sleep(0.05)  # a service somewhere: other episodes go on meanwhile
    if unit not in PER_METRE:
        # The model reads this and may try again. Any other exception is an infrastructure error.
        raise ToolError(f"no unit {unit!r}; the units are: {', '.join(PER_METRE)}")
    return round(metres * PER_METRE[unit], 2)


class Convert(ToolEnv):
    """How long is something in another unit?"""

    system_prompt = "Answer with \\boxed{}."
    tools = (convert,)

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        rng = random.Random(f"{seed}/{(options or {}).get('split', 'train')}")
        metres, unit = rng.randint(2, 500), rng.choice(list(PER_METRE))
        self.answer = round(metres * PER_METRE[unit], 2)
        return self.ask(f"How many {unit} are {metres} metres?"), {}

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        answer = extract_boxed(trajectory.answer)
        return {"correct": float(answer is not None and is_same_answer(answer, str(self.answer)))}
