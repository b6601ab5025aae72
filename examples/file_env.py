"""An environment of files, for agents: two numbers lie in a file, and their sum is wanted in another one.

agentrl train --env examples/file_env.py:Sums --agent "python examples/file_agent.py"
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from agentrl import AgentEnv, Trajectory


class Sums(AgentEnv):
    """Ask for the sum of the numbers in `numbers.txt`, in `answer.txt`."""

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        numbers = [random.Random(seed).randrange(10, 60), random.Random(-seed).randrange(10, 60)]
        self.files = {"numbers.txt": "\n".join(map(str, numbers))}
        self.right = str(sum(numbers))
        return "Write the sum of the numbers in numbers.txt into answer.txt.", {"expected": self.right}

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        left = await self.read_file("answer.txt")
        return {
            "right": float(left is not None and left.strip() == self.right),
            "written": float(left is not None) / 10,
        }
