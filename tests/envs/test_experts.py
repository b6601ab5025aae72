"""The experts of the environments that ship earn the best reward, and play in more than one way."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from agentrl import EnvSpec, Trajectory
from agentrl.environments.task_sampler import task_integer
from agentrl.rollout.expert import play_expert
from agentrl.settings.schema import RolloutConfig


def play(name: str, tasks: int, split: str = "train", **settings: Any) -> list[Trajectory]:
    """Play the expert on the first tasks of a split."""

    async def run() -> list[Trajectory]:
        spec = EnvSpec(name, **settings)
        async with spec.open():
            count = spec.count(split)
            numbers = [task_integer(split, i) for i in range(tasks)] if count is None else range(min(tasks, count))
            played = await play_expert(spec, numbers, RolloutConfig(), split=split)
            return [p.trajectory for p in played]

    return anyio.run(run)


def ways(trajectories: list[Trajectory]) -> set[tuple[str, ...]]:
    """Return the sequences of tools that were called."""
    return {tuple(c.name for c in t.calls) for t in trajectories}


@pytest.mark.parametrize("level", [1, 3, 4])
def test_math_tools_computes_all_at_once_or_a_part_first(level: int) -> None:
    played = play("math-tools", 200, level=level)
    assert {t.reward for t in played} == {1.0}
    assert ways(played) == {("calculator",), ("calculator", "calculator")}
    assert all(c.status == "ok" for t in played for c in t.calls)
    assert {t.reward for t in play("math-tools", 50, "test", level=level)} == {1.0}


def test_math_tools_writes_python_where_that_is_the_tool() -> None:
    played = play("math-tools", 20, tool="python", level=4)
    assert {t.reward for t in played} == {1.0}
    assert ways(played) <= {("python",), ("python", "python")}
