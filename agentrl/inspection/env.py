"""Does an environment keep its contract, and what it promises beyond it?"""

from __future__ import annotations

from agentrl.env import Env, EnvSpec
from agentrl.errors import UserError
from agentrl.inspection import alone, apart, faults, resets, rewards, schemas
from agentrl.inspection.finding import Finding, fail, ok
from agentrl.inspection.held import held, left_open
from agentrl.inspection.plays import Plays
from agentrl.inspection.policies import first, garbage
from agentrl.rollout import check_deadlines
from agentrl.tool import Tool

WIDE = 4  # times as many tasks where one is quick


def check_env(env: str | type[Env] | EnvSpec, *, tasks: int = 8) -> list[Finding]:
    """Play an environment with policies that have learnt nothing, and say what was found.

    Args:
        env: a registered name, ``module:Class``, an ``Env`` subclass, or a spec with settings.
        tasks: how many seeds are looked at; some checks take four times as many.

    Raises:
        UserError: there is no such environment, or a setting is wrong.
    """
    spec = env if isinstance(env, EnvSpec) else EnvSpec(env)
    before = held()
    return [*alone.run(_inspected, spec, tasks), *left_open(before)]


async def _inspected(spec: EnvSpec, tasks: int) -> list[Finding]:
    async with spec.open():
        return await _opened(spec, tasks)


async def _opened(spec: EnvSpec, tasks: int) -> list[Finding]:
    train, wide, test = (
        _tasks(spec, *asked) for asked in (("train", tasks), ("train", WIDE * tasks), ("test", WIDE * tasks))
    )
    plays = Plays(spec)
    found = await resets.repeats(plays, train)
    if plays.refused:  # nothing that follows would say more
        return faults.contract(plays)
    tools = await _tools(spec, train[0])
    plays.know(tools)
    shot = apart.roots(spec, tools)
    before = shot()
    found += await resets.repeats_elsewhere(plays, train)
    found += await resets.seeds_used(plays, train)
    found += await resets.splits_apart(plays, wide, test)
    found += await resets.dice_left_alone(plays, train)
    found += await apart.courses(plays, train)
    found += await apart.given_back(plays, train)
    found += await apart.closes(spec, train[0])
    found += await rewards.free(plays, wide)
    odd = [first(text) for text in garbage(plays.tools)]
    await plays.play(odd, [train[place % len(train)] for place in range(len(odd))], together=True)
    found += apart.kept(before, shot())
    found += (
        faults.contract(plays) + faults.survived(plays.played) + faults.blocking(plays) + faults.plain(plays.played)
    )
    return found + rewards.names(plays.played) + schemas.told(tools) + deadlines(spec)


def _tasks(spec: EnvSpec, split: str, wanted: int) -> list[int]:
    count = spec.make().count(split)
    return list(range(wanted if count is None else min(wanted, count)))


async def _tools(spec: EnvSpec, task: int) -> list[Tool]:
    """As the first task has them."""
    env = spec.make()
    try:
        await apart.tried(lambda: env.reset(seed=task, options={"split": "train"}))
        return list(env.tool_list)
    finally:
        await apart.tried(env.close)
        await apart.tried(env.close_tools)


def deadlines(spec: EnvSpec) -> list[Finding]:
    """A tool's deadline is within that of the turn that waits for it."""
    try:
        check_deadlines(spec, 120.0)
    except UserError as error:
        return [fail("deadlines", str(error))]
    return [ok("deadlines", "each tool's deadline is within that of a turn")]
