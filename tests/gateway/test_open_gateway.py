"""An agent plays in this process or in players: the same rows, and its mistakes end the run in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl import EnvSpec, UserError
from agentrl.gateway.open_gateway import AgentPlan, open_gateway, plan_agent
from agentrl.players.recipe import read_agent
from agentrl.resources import open_resources
from agentrl.settings.schema import TrainConfig
from agentrl.types import Group

pytestmark = pytest.mark.anyio
AGENT = Path(__file__).parents[2] / "examples" / "openai_agent.py"
BROKEN = """
async def solve(task):
    raise KeyError("no such thing")
"""
SECOND = """
import json, urllib.request, os

task = json.load(open(os.environ["AGENTRL_TASK"]))
body = json.dumps({"model": "policy", "messages": task["messages"], "tools": task["tools"]}).encode()
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, head)).read()
"""


def configure(agent: str | None, players: int = 0, **more: Any) -> TrainConfig:
    given: dict[str, Any] = {"env": {"name": "math-tools"}, "deterministic": True, "agent": agent, **more}
    return TrainConfig.model_validate(given | ({"players": {"count": players}} if players else {}))


async def roll_out(config: TrainConfig, tasks: int) -> list[Group]:
    async with open_resources(config, EnvSpec.from_config(config)) as resources:
        assert (resources.gateway is None) == (config.agent is None or config.players.are_used)
        return await resources.rollout("train").batch(range(tasks), 4, seed=1)


@pytest.mark.slow
async def test_agents_in_players_play_the_rows_of_an_agent_beside_the_run() -> None:
    agent = f"{AGENT}:solve"
    here, there = await roll_out(configure(agent), 4), await roll_out(configure(agent, players=2), 4)
    for one, other in zip(here, there, strict=True):
        for mine, yours in zip(one, other, strict=True):
            assert yours.fault is None
            assert yours.segments == mine.segments
            assert (yours.rewards, yours.stop, yours.step_rewards) == (mine.rewards, mine.stop, mine.step_rewards)
            assert [c.status for c in yours.calls] == [c.status for c in mine.calls]


@pytest.mark.slow
async def test_a_command_plays_in_players(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(SECOND)
    groups = await roll_out(configure(f"python {tmp_path / 'agent.py'}", players=2), 2)
    assert {(t.turns, t.fault, len(t.rewards) > 0) for g in groups for t in g} == {(1, None, True)}


async def test_an_agent_that_players_do_not_find_ends_the_run_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(BROKEN)
    config = configure(f"{path}:solve", players=1)
    path.unlink()
    with pytest.raises(UserError, match=r"player 1 cannot start: agent .*agent\.py:solve.*there is no file"):
        await roll_out(config, 2)


async def test_the_same_error_in_half_of_a_players_episodes_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(BROKEN)
    more = {"rollout": {"tasks_per_step": 4, "group_size": 4}}
    with pytest.raises(UserError, match=r"the agent ends by the same error in \d+ of .*KeyError: 'no such thing'"):
        await roll_out(configure(f"{tmp_path / 'agent.py'}:solve", players=2, **more), 8)


def test_a_plan_crosses_as_plain_data() -> None:
    config = configure("python a.py", players=4, agent_sandbox="bubblewrap", agent_readable=["/opt"])
    plan = plan_agent(config, EnvSpec("math-tools"))
    assert plan is not None
    assert (plan.sandboxed, plan.readable) == (True, ("/opt",))
    assert plan.episodes == config.rollout.tasks_per_step * config.rollout.group_size // 4
    sent = {**vars(plan), "readable": list(plan.readable), "hidden": list(plan.hidden)}
    assert read_agent(sent) == plan
    assert read_agent(None) is plan_agent(configure(None), EnvSpec("math-tools")) is None


async def test_where_no_agent_plays_no_endpoint_is_opened() -> None:
    async with open_gateway(None) as gateway:
        assert gateway is None
    async with open_gateway(AgentPlan(None)) as gateway:
        assert gateway is not None
        assert gateway.agent is None
