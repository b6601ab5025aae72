"""An agent on OpenAI's SDK beside the environment itself: the same rows, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl import EnvSpec
from agentrl.resources import open_resources
from agentrl.settings.schema import TrainConfig
from agentrl.types import Group

AGENT = Path(__file__).parents[2] / "examples" / "openai_agent.py"


async def roll_out(agent: str | None, tasks: int) -> list[Group]:
    given = {"env": {"name": "math-tools"}, "deterministic": True, "agent": agent}
    config = TrainConfig.model_validate(given)
    async with open_resources(config, EnvSpec.from_config(config)) as resources:
        return await resources.rollout("train").batch(range(tasks), 4, seed=1)


@pytest.mark.anyio
async def test_an_agent_that_plays_as_the_environment_gives_the_same_rows() -> None:
    native, own = await roll_out(None, 6), await roll_out(f"{AGENT}:solve", 6)
    pairs = [
        (a, b) for g, h in zip(native, own, strict=True) for a, b in zip(g.trajectories, h.trajectories, strict=True)
    ]
    assert sum(c.failed for a, _ in pairs for c in a.calls) > 2
    for one, other in pairs:
        assert other.segments == one.segments
        assert (other.rewards, other.stop, other.step_rewards) == (one.rewards, one.stop, one.step_rewards)
        assert [read_call(c) for c in other.calls] == [read_call(c) for c in one.calls]


def read_call(record: Any) -> tuple[Any, ...]:
    return record.turn, record.name, record.status, record.span
