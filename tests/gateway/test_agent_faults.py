"""Faults of episodes that agents play: whose they are, as it is of episodes that the environment plays."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl import EnvSpec, Reply, Step
from agentrl.errors import InfraError
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from tests.helpers.agents import Sums, play, solve

pytestmark = pytest.mark.anyio
ADD = call("add", a=1, b=1)


class Checked(Sums):
    """One whose world works."""

    worst_reward = -1.0

    async def health_check(self) -> None: ...


class Bombed(Checked):
    """Breaks by a call."""

    async def step(self, action: Reply) -> Step:
        if action.tool_calls:
            raise InfraError("sandbox_gone", "killed by what was run")
        return await super().step(action)


async def test_a_step_that_breaks_by_a_call_is_provoked_as_it_is_natively() -> None:
    spec = EnvSpec(Bombed)
    async with spec.open():
        native = await Rollout(spec, ScriptedEngine([ADD]), ByteRenderer()).episode(1)
    own = await play(solve, [ADD], env=Bombed)
    found: list[Any] = [(t.fault and t.fault.kind, t.fault and t.fault.provoked, t.reward) for t in (native, own)]
    assert found == [("sandbox_gone", True, -1.0)] * 2
