"""Does an environment keep its contract, and what it promises beyond it?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from agentrl.env import Env, EnvSpec
from agentrl.errors import UserError
from agentrl.inspection import alone, apart, branches, faults, resets, rewards, schemas
from agentrl.inspection.consent import select_allowed
from agentrl.inspection.finding import Finding, fail, failures, ok, skip
from agentrl.inspection.held import held as count_open
from agentrl.inspection.held import left_open
from agentrl.inspection.plays import Plays
from agentrl.inspection.policies import first, garbage
from agentrl.inspection.progress import Check, Inspection, Report
from agentrl.rollout import check_deadlines
from agentrl.tasks import task_integer
from agentrl.tool import Tool

WIDE = 4  # times as many tasks where one is quick


def check_env(
    env: str | type[Env] | EnvSpec,
    *,
    tasks: int = 8,
    budget_s: float | None = None,
    allow_writes: Collection[str] = (),
    on_finding: Report | None = None,
    on_check: Callable[[str], None] | None = None,
) -> list[Finding]:
    """Play an environment with policies that have learnt nothing, and return what was found.

    Args:
        env: a registered name, ``module:Class``, an ``Env`` subclass, or a spec with settings.
        tasks: how many seeds are looked at; some checks take four times as many.
        budget_s, on_finding, on_check: as `agentrl.inspection.progress.Inspection` takes them.
        allow_writes: tools with ``writes=True`` that policies may call; they call no other such tool.

    Raises:
        UserError: there is no such environment or tool, or a setting is wrong.
    """
    spec = env if isinstance(env, EnvSpec) else EnvSpec(env)
    before = count_open()
    inspection = Inspection(budget_s, on_finding, on_check)
    alone.run(_inspect, spec, tasks, allow_writes, inspection)
    inspection.add(*left_open(before))
    return inspection.findings


async def _inspect(spec: EnvSpec, tasks: int, allow_writes: Collection[str], inspection: Inspection) -> None:
    async with spec.open():
        train, wide, test = (
            _tasks(spec, *asked) for asked in (("train", tasks), ("train", WIDE * tasks), ("test", WIDE * tasks))
        )
        plays = Plays(spec)
        await inspection.run("begins", lambda: resets.begins(plays, train))
        if plays.refused:
            inspection.add(*faults.contract(plays))
        if failures(inspection.findings):  # nothing that follows would say more
            return
        tools, left_alone = select_allowed(await _tools(spec, train[0]), allow_writes)
        plays.know(tools)
        inspection.add(*left_alone)
        shot = apart.roots(spec, tools)
        before = shot()
        await _play(plays, spec, inspection, train, wide, test)
        inspection.add(*apart.kept(before, shot()), *faults.contract(plays))
        inspection.add(*faults.blocking(plays), *faults.plain(plays.played), *rewards.names(plays.played))
        inspection.add(*schemas.told(tools), *deadlines(spec))


async def _play(
    plays: Plays, spec: EnvSpec, inspection: Inspection, train: Sequence[int], wide: Sequence[int], test: Sequence[int]
) -> None:
    """Run the checks that play episodes, those that say most of an hour's work first."""
    checks: tuple[tuple[str, Check], ...] = (
        (resets.SEED, lambda: resets.repeats(plays, train)),
        ("seed-used", lambda: resets.seeds_used(plays, train)),
        ("splits-apart", lambda: resets.splits_apart(plays, wide, test)),
        ("free-reward", lambda: rewards.free(plays, wide)),
        ("episodes-apart", lambda: apart.courses(plays, train)),
        ("branches", lambda: branches.branches(plays, train)),
        ("closes", lambda: apart.closes(spec, train[0])),
        ("same-seed-elsewhere", lambda: resets.repeats_elsewhere(plays, train)),
        ("global-dice", lambda: resets.dice_left_alone(plays, train)),
        ("left-open", lambda: apart.given_back(plays, train)),
        ("survives", lambda: _say_garbage(plays, train)),
    )
    for name, check in checks:
        await inspection.run(name, check)


async def _say_garbage(plays: Plays, train: Sequence[int]) -> list[Finding]:
    """Play turns as a model at its worst writes them; return the faults of all episodes."""
    odd = [first(text) for text in garbage(plays.tools)]
    await plays.play(odd, [train[place % len(train)] for place in range(len(odd))], together=True)
    return faults.survived(plays.played)


def _tasks(spec: EnvSpec, split: str, wanted: int) -> list[int]:
    count = spec.make().count(split)
    return [task_integer(split, index) for index in range(wanted)] if count is None else list(range(min(wanted, count)))


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
    if not spec.make().tool_list:
        return [skip("deadlines", "there are no tools")]
    try:
        check_deadlines(spec, 120.0)
    except UserError as error:
        return [fail("deadlines", str(error))]
    return [ok("deadlines", "each tool's deadline is within that of a turn")]
