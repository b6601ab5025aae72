"""Does a tool, or a toolset, keep its contract? It is called as models call it, and played with as a run does."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio

from agentrl.env import EnvSpec, ToolEnv
from agentrl.errors import ToolError, UserError, WorldFault
from agentrl.inspection import alone, apart, cancelling, faults, schemas
from agentrl.inspection.arguments import conforming, wrong
from agentrl.inspection.consent import select_allowed
from agentrl.inspection.env import deadlines
from agentrl.inspection.finding import Finding, fail, ok, skip
from agentrl.inspection.held import held, left_open
from agentrl.inspection.plays import Plays
from agentrl.inspection.progress import Inspection, Report
from agentrl.tool import Tool
from agentrl.toolset import Toolset, named
from agentrl.types import Observation, utf8_within

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
    on_finding: Report | None = None,
    on_check: Callable[[str], None] | None = None,
) -> list[Finding]:
    """Call a tool with arguments good and bad, cancel it, play episodes with it, and return what was found.

    A tool that may change what is outside of the episode (``writes=True``; of an MCP server, one without its
    readOnlyHint) is called only if ``allow_writes`` names it.

    Args:
        tool: a registered name, ``module:attribute``, or the tool or toolset itself.
        settings: of a toolset that is named, as ``--tool.NAME.SETTING``.
        tasks: how many episodes are played in a round.
        budget_s, on_finding, on_check: as `agentrl.inspection.progress.Inspection` takes them.
        allow_writes: names of tools.

    Raises:
        UserError: there is no such tool, or a setting is wrong.
    """
    given = named(tool, settings) if isinstance(tool, str) else tool
    bench = type("Bench", (_Bench,), {"tools": (given,)})
    before = held()
    inspection = Inspection(budget_s, on_finding, on_check)
    alone.run(_inspect, EnvSpec(bench), tasks, allow_writes, inspection)
    inspection.add(*left_open(before))
    return inspection.findings


class _Bench(ToolEnv):
    """A place to try tools in."""

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return self.ask(f"Task {seed}."), {}


async def _inspect(spec: EnvSpec, tasks: int, allow_writes: Collection[str], inspection: Inspection) -> None:
    async with spec.open():
        env = spec.make()
        try:
            await env.reset(seed=0)
            tools, left_alone = select_allowed(list(env.tool_list), allow_writes)
            inspection.add(*schemas.told(list(env.tool_list)), *deadlines(spec), *left_alone)
            for tool in tools:
                await _call(replace(tool, retries=0, timeout_s=min(tool.timeout_s, DEADLINE_S)), inspection)
        finally:
            await env.close_tools()
        if tools:
            await _play(spec, tools, list(range(tasks)), inspection)


async def _play(spec: EnvSpec, tools: Sequence[Tool], tasks: Sequence[int], inspection: Inspection) -> None:
    """Check that episodes which share the tool keep to themselves."""
    plays = Plays(spec, tools)
    shot = apart.roots(spec, tools)
    before = shot()
    await inspection.run("episodes-apart", lambda: apart.courses(plays, tasks))
    await inspection.run("left-open", lambda: apart.given_back(plays, tasks))
    inspection.add(*apart.kept(before, shot()))
    if plays.refused:
        inspection.add(*faults.contract(plays))
    inspection.add(*faults.blocking(plays))


async def _call(tool: Tool, inspection: Inspection) -> None:
    rng = random.Random(0)
    good = [conforming(tool.parameters, rng) for _ in range(CALLS)]
    bad = list(wrong(tool.parameters, rng))
    await inspection.run("good-arguments", lambda: _take("good-arguments", tool, good, together=True))
    await inspection.run("bad-arguments", lambda: _take("bad-arguments", tool, bad, together=False))
    await inspection.run("cancelled", lambda: cancelling.heeded(tool, good))


async def _take(name: str, tool: Tool, given: Sequence[dict[str, Any]], *, together: bool) -> list[Finding]:
    """Call it with each of the arguments, as a model would: every call must end in text, or in a ToolError.

    Args:
        together: all at once, as the calls of a turn run; one after another, what breaks is the call's own fault.
    """
    wrongs: dict[str, Finding] = {}
    refusals: list[str] = []

    async def one(arguments: dict[str, Any]) -> None:
        try:
            await tool(**tool.check(utf8_within(arguments)))
        except ToolError as refusal:
            refusals.append(str(refusal))
        except (WorldFault, UserError) as error:
            said = f"called with {arguments!r:.100}: {error!s:.300}; raise ToolError for what the model did wrong"
            wrongs.setdefault(str(error).partition(":")[0], fail(name, said))

    async with anyio.create_task_group() as calls:
        for arguments in given:
            if together:
                calls.start_soon(one, arguments)
            else:
                await one(arguments)
    if wrongs:
        return list(wrongs.values())[:SHOWN]
    answered = len(given) - len(refusals)
    if name == "good-arguments" and not answered:
        said = f"tool {tool.name!r} refused all {len(given)} calls, the first with {refusals[0]!r:.100}"
        way_out = "give an example in the argument's description, in double quotes, or under `examples` in the schema"
        return [skip(name, f"nothing was shown: {said}; {way_out}")]
    said = f"answered {answered} calls and refused {len(refusals)} in words for the model"
    return [ok(name, f"tool {tool.name!r} {said}")]
