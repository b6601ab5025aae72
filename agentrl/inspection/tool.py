"""Does a tool, or a toolset, keep its contract? It is called as models call it, and played with as a run does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio

from agentrl.env import EnvSpec, ToolEnv
from agentrl.errors import ToolError, UserError, WorldFault
from agentrl.inspection import alone, apart, cancelling, faults, schemas
from agentrl.inspection.arguments import conforming, wrong
from agentrl.inspection.env import deadlines
from agentrl.inspection.finding import Finding, fail, ok
from agentrl.inspection.held import held, left_open
from agentrl.inspection.plays import Plays
from agentrl.inspection.policies import calls
from agentrl.tool import Tool
from agentrl.toolset import Toolset, named
from agentrl.types import Observation

CALLS = 16  # of each tool
SHOWN = 3
DEADLINE_S = 10.0  # of a call here, where the tool's own is longer


def check_tool(
    tool: str | Tool | Toolset | type[Toolset], *, settings: Mapping[str, Any] | None = None, tasks: int = 8
) -> list[Finding]:
    """Call a tool with arguments good and bad, cancel it, play episodes with it, and say what was found.

    Args:
        tool: a registered name, ``module:attribute``, or the tool or toolset itself.
        settings: of a toolset that is named, as ``--tool.NAME.SETTING``.
        tasks: how many episodes are played in a round.

    Raises:
        UserError: there is no such tool, or a setting is wrong.
    """
    found = named(tool, settings) if isinstance(tool, str) else tool
    bench = type("Bench", (_Bench,), {"tools": (found,)})
    before = held()
    return [*alone.run(_inspected, EnvSpec(bench), tasks), *left_open(before)]


class _Bench(ToolEnv):
    """A place to try tools in."""

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return self.ask(f"Task {seed}."), {}


async def _inspected(spec: EnvSpec, tasks: int) -> list[Finding]:
    async with spec.open():
        env = spec.make()
        try:
            await env.reset(seed=0)
            tools = list(env.tool_list)
            found = schemas.told(tools) + deadlines(spec)
            found += [
                f for t in tools for f in await _called(replace(t, retries=0, timeout_s=min(t.timeout_s, DEADLINE_S)))
            ]
        finally:
            await env.close_tools()
        return found + await _played(spec, tools, list(range(tasks)))


async def _played(spec: EnvSpec, tools: Sequence[Tool], tasks: Sequence[int]) -> list[Finding]:
    """Episodes that share the tool keep to themselves."""
    plays = Plays(spec, tools)
    shot = apart.roots(spec, tools)
    await plays.play(calls, tasks)
    before = shot()
    found = await apart.courses(plays, tasks)
    found += await apart.given_back(plays, tasks)
    found += apart.kept(before, shot())
    if plays.refused:
        found += faults.contract(plays)
    return found + faults.blocking(plays)


async def _called(tool: Tool) -> list[Finding]:
    rng = random.Random(0)
    good = [conforming(tool.parameters, rng) for _ in range(CALLS)]
    found = await _taken("good-arguments", tool, good)
    found += await _taken("bad-arguments", tool, list(wrong(tool.parameters, rng)))
    return found + await cancelling.heeded(tool, good)


async def _taken(name: str, tool: Tool, given: Sequence[dict[str, Any]]) -> list[Finding]:
    """Each call ends in text, or in a ToolError: what else is raised ends the episode it is called in."""
    wrongs: dict[str, Finding] = {}
    ends: Counter[str] = Counter()

    async def one(arguments: dict[str, Any]) -> None:
        try:
            await tool(**tool.check(arguments))
            ends["answered"] += 1
        except ToolError:
            ends["refused"] += 1
        except (WorldFault, UserError) as error:
            said = f"called with {arguments!r:.100}: {error!s:.300}; raise ToolError for what the model did wrong"
            wrongs.setdefault(str(error).partition(":")[0], fail(name, said))

    async with anyio.create_task_group() as calls:
        for arguments in given:
            calls.start_soon(one, arguments)
    if wrongs:
        return list(wrongs.values())[:SHOWN]
    said = f"answered {ends['answered']} calls and refused {ends['refused']} in words for the model"
    return [ok(name, f"tool {tool.name!r} {said}")]
