"""Does a call end when it is cancelled, as it is when an episode's deadline passes?"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio

from agentrl.errors import ToolError, UserError, WorldFault
from agentrl.inspection.finding import Finding, fail, ok, warn
from agentrl.tool import Tool

MOMENTS_S = (0.0, 0.001, 0.05)  # after which a call is cancelled
PATIENCE_S = 2.0  # for what was cancelled to end


async def heeded(tool: Tool, given: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Cancelled at several moments, a call leaves no task and no thread behind."""
    name = "cancelled"
    for moment in MOMENTS_S:
        for arguments in given[:4]:
            before = _running()
            with anyio.move_on_after(moment), suppress(ToolError, WorldFault, UserError):  # those are told elsewhere
                await tool(**tool.check(arguments))
            left = await _left(before)
            if any(isinstance(one, asyncio.Task) for one in left):
                said = f"tool {tool.name!r}, cancelled after {moment:g} s, went on for over {PATIENCE_S:g} s"
                return [fail(name, f"{said}: it must let CancelledError pass, and clean up at once")]
            if left:
                said = f"tool {tool.name!r} is a sync function, which cannot be cancelled, and went on in its thread"
                return [warn(name, f"{said} for over {PATIENCE_S:g} s: say @tool(process=True), or write it async")]
    return [ok(name, f"tool {tool.name!r} ended at once when it was cancelled")]


def _running() -> set[object]:
    """Tasks of the loop, and the threads that sync tools run in."""
    return {*asyncio.all_tasks(), *(t for t in threading.enumerate() if t.name == "agentrl function")}


async def _left(before: set[object]) -> set[object]:
    """What is still there, and was not before, when patience is at its end."""
    left: set[object] = set()
    for _ in range(20):
        if not (left := _running() - before):
            break
        await anyio.sleep(PATIENCE_S / 20)
    return left
