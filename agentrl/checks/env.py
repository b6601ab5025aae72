"""The checks of an environment: its contract, its tasks, its rewards, its state and its speed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from agentrl.checks import branches, determinism, expert, faults, free_reward, isolated_loop, isolation, tool_schemas
from agentrl.checks.budget import Check, CheckRun, FindingCallback
from agentrl.checks.consent import select_allowed
from agentrl.checks.finding import Finding, fail, failures, ok, skip
from agentrl.checks.harness import EpisodeHarness, open_harness
from agentrl.checks.untrained_policies import generate_garbage, say_once
from agentrl.environments.env import Env
from agentrl.environments.spec import EnvSpec
from agentrl.environments.task_sampler import task_integer
from agentrl.errors import ContractError, UserError
from agentrl.rollout.rollout import check_deadlines
from agentrl.tools.tool import Tool

WIDE = 4  # times as many tasks where one is quick


def check_env(
    env: str | type[Env] | EnvSpec,
    *,
    tasks: int = 8,
    budget_s: float | None = None,
    allow_writes: Collection[str] = (),
    on_finding: FindingCallback | None = None,
    on_check: Callable[[str], None] | None = None,
) -> list[Finding]:
    """Play an environment with policies that have learnt nothing, and return what was found.

    Args:
        env: a registered name, ``module:Class``, an ``Env`` subclass, or a spec with settings.
        tasks: how many seeds are looked at; some checks take four times as many.
        budget_s, on_finding, on_check: as `agentrl.checks.budget.CheckRun` takes them.
        allow_writes: tools with ``writes=True`` that policies may call; they call no other such tool.

    Raises:
        UserError: there is no such environment or tool, or a setting is wrong.
    """
    spec = env if isinstance(env, EnvSpec) else EnvSpec(env)
    return isolated_loop.run_inspection(_inspect, spec, tasks, allow_writes, CheckRun(budget_s, on_finding, on_check))


async def _inspect(spec: EnvSpec, tasks: int, allow_writes: Collection[str], run: CheckRun) -> None:
    async with open_harness(spec) as harness:
        train, wide, test = (
            _list_tasks(spec, *take) for take in (("train", tasks), ("train", WIDE * tasks), ("test", WIDE * tasks))
        )
        await run.run("begins", lambda: determinism.check_begins(harness, train))
        if harness.broken_contracts:
            run.add(*faults.check_contract(harness))
        if failures(run.findings):  # nothing that follows would say more
            return
        tools, skipped = select_allowed(await _list_tools(spec, train[0]), allow_writes)
        harness.set_tools(tools)
        run.add(*skipped)
        snapshot = isolation.make_state_snapshot(spec, tools)
        before = snapshot()
        await _play(harness, spec, run, train, wide, test)
        await run.run(expert.EXPERT, lambda: expert.check_expert(spec, train, [f.why for f in skipped]))
        run.add(*isolation.check_state_kept(before, snapshot()), *faults.check_contract(harness))
        run.add(
            *faults.check_blocking(harness),
            *faults.check_json(harness.played),
            *free_reward.check_reward_names(harness.played),
        )
        run.add(*tool_schemas.check_tool_schemas(tools), *check_tool_deadlines(spec))


async def _play(
    harness: EpisodeHarness,
    spec: EnvSpec,
    run: CheckRun,
    train: Sequence[int],
    wide: Sequence[int],
    test: Sequence[int],
) -> None:
    """Run the checks that play episodes, the most telling first."""
    checks: tuple[tuple[str, Check], ...] = (
        (determinism.SEED, lambda: determinism.check_repeats(harness, train)),
        ("seed-used", lambda: determinism.check_seeds_used(harness, train)),
        ("splits-apart", lambda: determinism.check_splits_apart(harness, wide, test)),
        ("free-reward", lambda: free_reward.check_free_reward(harness, wide)),
        ("episodes-apart", lambda: isolation.check_episodes_apart(harness, train)),
        ("branches", lambda: branches.check_branches(harness, train)),
        ("closes", lambda: isolation.check_closes(spec, train[0])),
        ("same-seed-elsewhere", lambda: determinism.check_repeats_elsewhere(harness, train)),
        ("global-rng", lambda: determinism.check_global_rng(harness, train)),
        ("left-open", lambda: isolation.check_left_open(harness, train)),
        ("survives", lambda: _say_garbage(harness, train)),
    )
    for name, check in checks:
        await run.run(name, check)


async def _say_garbage(harness: EpisodeHarness, train: Sequence[int]) -> list[Finding]:
    """Play turns as a model at its worst writes them; return the faults of all episodes."""
    odd = [say_once(text) for text in generate_garbage(harness.tools)]
    await harness.play(odd, [train[place % len(train)] for place in range(len(odd))], together=True)
    return faults.check_survives(harness.played)


def _list_tasks(spec: EnvSpec, split: str, most: int) -> list[int]:
    count = spec.count(split)
    if count == 0 and split == "train":
        raise ContractError(f"{spec.cls.__name__}.count('train') is 0: there is no task to play")
    return [task_integer(split, index) for index in range(most)] if count is None else list(range(min(most, count)))


async def _list_tools(spec: EnvSpec, task: int) -> list[Tool]:
    """List the tools of a task."""
    env = spec.make()
    try:
        await isolation.catch_error(lambda: env.reset(seed=task, options={"split": "train"}))
        return list(env.tool_list)
    finally:
        await isolation.catch_error(env.close)
        await isolation.catch_error(env.close_tools)


def check_tool_deadlines(spec: EnvSpec) -> list[Finding]:
    """Check that a tool's deadline is within that of the turn that waits for it."""
    if not spec.tool_list():
        return [skip("deadlines", "there are no tools")]
    try:
        check_deadlines(spec, 120.0)
    except UserError as error:
        return [fail("deadlines", str(error))]
    return [ok("deadlines", "each tool's deadline is within that of a turn")]
