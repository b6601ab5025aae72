"""The same, as a module that is on the path."""

from collections.abc import Mapping
from typing import Any

from agentrl import ToolEnv, Trajectory
from agentrl.types import Observation


class MyEnv(ToolEnv):
    """Say a number."""

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        split = (options or {}).get("split", "train")
        self.number = 2 * seed + (split == "test")
        return self.ask(f"Say {self.number}."), {}

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"said": float(str(self.number) in trajectory.answer)}
