"""The checks of a tool or a toolset: it is called as models call it, and played with as a run does."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio

from agentrl.checks import cancellation, faults, isolated_loop, isolation, tool_schemas
from agentrl.checks.argument_fuzzing import draw_arguments, draw_wrong_arguments
from agentrl.checks.budget import CheckRun, FindingCallback
from agentrl.checks.consent import select_allowed
from agentrl.checks.env import check_tool_deadlines
from agentrl.checks.finding import Finding, fail, ok, skip
from agentrl.checks.harness import EpisodeHarness
from agentrl.environments.env import ToolEnv
from agentrl.environments.spec import EnvSpec
from agentrl.errors import InfraError, ToolError, UserError
from agentrl.tools.tool import Tool
from agentrl.tools.toolset import Toolset, load_tool
from agentrl.types import Observation, to_utf8_json

CALLS = 16  # of each tool
SHOWN = 3
DEADLINE_S = 10.0  # of a call here, where the tool's own is longer


def check_tool(
    tool: str | Tool | Toolset | type[Toolset],
    *,
    settings: Mapping[str, Any] | None = None,
    tasks: int = 8,
    budget_s: float | None = None,
    allow_writes: Collection[str] = (),
    on_finding: FindingCallback | None = None,
    on_check: Callable[[str], None] | None = None,
) -> list[Finding]:
    """Call a tool with arguments good and bad, cancel it, play episodes with it, and return what was found.

    A tool that may change what is outside of the episode (``writes=True``; of an MCP server, one without its
    readOnlyHint) is called only if ``allow_writes`` names it.

    Args:
        tool: a registered name, ``module:attribute``, or the tool or toolset itself.
        settings: of a toolset that is named, as ``--tool.NAME.SETTING``.
        tasks: how many episodes are played in a round.
        budget_s, allow_writes, on_finding, on_check: as for `agentrl.checks.env.check_env`.

    Raises:
        UserError: there is no such tool, or a setting is wrong.
    """
    pattern = load_tool(tool, settings) if isinstance(tool, str) else tool
    bench = type("Bench", (_Bench,), {"tools": (pattern,)})
    return isolated_loop.run_inspection(
        _inspect, EnvSpec(bench), tasks, allow_writes, CheckRun(budget_s, on_finding, on_check)
    )


class _Bench(ToolEnv):
    """An environment in which a tool is tried."""

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return self.ask(f"Task {seed}."), {}


async def _inspect(spec: EnvSpec, tasks: int, allow_writes: Collection[str], run: CheckRun) -> None:
    async with spec.open():
        env = spec.make()
        try:
            await env.reset(seed=0)
            tools, skipped = select_allowed(list(env.tool_list), allow_writes)
            run.add(*tool_schemas.check_tool_schemas(list(env.tool_list)), *check_tool_deadlines(spec), *skipped)
            for tool in tools:
                await _call(replace(tool, retries=0, timeout_s=min(tool.timeout_s, DEADLINE_S)), run)
        finally:
            await env.close_tools()
        if tools:
            await _play(spec, tools, list(range(tasks)), run)


async def _play(spec: EnvSpec, tools: Sequence[Tool], tasks: Sequence[int], run: CheckRun) -> None:
    """Check that episodes that share the tool keep to themselves."""
    harness = EpisodeHarness(spec, tools)
    snapshot = isolation.make_state_snapshot(spec, tools)
    before = snapshot()
    await run.run("episodes-apart", lambda: isolation.check_episodes_apart(harness, tasks))
    await run.run("left-open", lambda: isolation.check_left_open(harness, tasks))
    run.add(*isolation.check_state_kept(before, snapshot()))
    if harness.broken_contracts:
        run.add(*faults.check_contract(harness))
    run.add(*faults.check_blocking(harness))


async def _call(tool: Tool, run: CheckRun) -> None:
    rng = random.Random(0)
    good = [draw_arguments(tool.parameters, rng) for _ in range(CALLS)]
    bad = list(draw_wrong_arguments(tool.parameters, rng))
    await run.run("good-arguments", lambda: _take("good-arguments", tool, good, together=True))
    await run.run("bad-arguments", lambda: _take("bad-arguments", tool, bad, together=False))
    await run.run("cancelled", lambda: cancellation.check_cancellation(tool, good))


async def _take(name: str, tool: Tool, calls: Sequence[dict[str, Any]], *, together: bool) -> list[Finding]:
    """Check that every call, made as a model would, ends in text or in a ToolError.

    Args:
        together: all at once, as the calls of a turn run; one after another, what breaks is the call's own fault.
    """
    wrongs: dict[str, Finding] = {}
    refusals: list[str] = []

    async def one(arguments: dict[str, Any]) -> None:
        try:
            await tool(**await tool.check_off_loop(to_utf8_json(arguments)))
        except ToolError as refusal:
            refusals.append(str(refusal))
        except (InfraError, UserError) as error:
            sentence = f"called with {arguments!r:.100}: {error!s:.300}; raise ToolError for what the model did wrong"
            wrongs.setdefault(str(error).partition(":")[0], fail(name, sentence))

    async with anyio.create_task_group() as tasks:
        for arguments in calls:
            if together:
                tasks.start_soon(one, arguments)
            else:
                await one(arguments)
    if wrongs:
        return list(wrongs.values())[:SHOWN]
    answered = len(calls) - len(refusals)
    if name == "good-arguments" and not answered:
        sentence = f"tool {tool.name!r} refused all {len(calls)} calls, the first with {refusals[0]!r:.100}"
        way_out = "give an example in the argument's description, in double quotes, or under `examples` in the schema"
        return [skip(name, f"nothing was shown: {sentence}; {way_out}")]
    sentence = f"answered {answered} calls and refused {len(refusals)} in words for the model"
    return [ok(name, f"tool {tool.name!r} {sentence}")]
