"""The gateway of a run: which agent plays, as plain data, and the endpoint that is opened for it in any process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentrl.agents.forms import AgentSandbox, parse_agent
from agentrl.environments.spec import EnvSpec
from agentrl.gateway.gateway import Gateway
from agentrl.rollout.rollout import Rollout
from agentrl.settings.schema import TrainConfig


@dataclass(frozen=True)
class AgentPlan:
    """The agent that plays a run's episodes, by names and numbers alone.

    Args:
        agent: the text that names it; None where the environment brings its own.
        workers: processes that a function is called in.
        sandboxed: a command runs in a sandbox, where it reads ``readable`` further and sees nothing of ``hidden``.
        episodes: of a step, as far as one process plays them.
    """

    agent: str | None
    workers: int = 2
    sandboxed: bool = False
    readable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    episodes: int = 128


def plan_agent(config: TrainConfig, spec: EnvSpec) -> AgentPlan | None:
    """Return the plan of the agent that the config names, or the environment brings; None where there is none."""
    if config.agent is None and not spec.brings_agent:
        return None
    episodes = config.rollout.tasks_per_step * config.rollout.group_size
    return AgentPlan(
        config.agent,
        config.agent_workers,
        config.agent_sandbox is not None,
        tuple(config.agent_readable),
        (config.run.dir or "runs", "runs", "evals", "served"),
        max(1, episodes // max(1, config.players.count)),
    )


@asynccontextmanager
async def open_gateway(plan: AgentPlan | None) -> AsyncIterator[Gateway | None]:
    """Open the endpoint, and start the agent, until the block ends; None where no agent plays.

    Raises:
        UserError: a package is missing, or there is no such agent here.
    """
    if plan is None:
        yield None
        return
    sandbox = AgentSandbox(plan.readable, plan.hidden) if plan.sandboxed else None
    agent = None if plan.agent is None else parse_agent(plan.agent, plan.workers, sandbox)
    async with Gateway(agent, plan.episodes).open() as gateway:
        yield gateway


def let_agents_play(rollout: Rollout, gateway: Gateway | None) -> None:
    """Begin a rollout's episodes at the gateway, where an agent plays them."""
    if gateway is not None and (gateway.agent is not None or rollout.spec.brings_agent):
        rollout.begin = gateway.begin
