"""The check that a tool call ends when it is cancelled, as it is when an episode's deadline passes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio

from agentrl.checks.finding import Finding, fail, ok, warn
from agentrl.errors import InfraError, ToolError, UserError
from agentrl.tools.tool import Tool

MOMENTS_S = (0.0, 0.001, 0.05)  # after which a call is cancelled
PATIENCE_S = 2.0  # for what was cancelled to end


async def check_cancellation(tool: Tool, calls: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Cancel calls at several moments; return a finding if one leaves a task or a thread behind.

    Args:
        calls: the arguments of each.
    """
    name = "cancelled"
    for moment in MOMENTS_S:
        for arguments in calls[:4]:
            before = _running()
            with anyio.move_on_after(moment), suppress(ToolError, InfraError, UserError):  # other checks report those
                await tool(**await tool.check_off_loop(arguments))
            left = await _wait_for_rest(before)
            if any(isinstance(one, asyncio.Task) for one in left):
                sentence = f"tool {tool.name!r}, cancelled after {moment:g} s, went on for over {PATIENCE_S:g} s"
                return [fail(name, f"{sentence}: it must let CancelledError pass, and clean up at once")]
            if left:
                sentence = (
                    f"tool {tool.name!r} is a sync function, which cannot be cancelled, and went on in its thread"
                )
                return [warn(name, f"{sentence} for over {PATIENCE_S:g} s: say @tool(process=True), or write it async")]
    return [ok(name, f"tool {tool.name!r} ended at once when it was cancelled")]


def _running() -> set[object]:
    """Return the tasks of the loop, and the threads that sync tools run in."""
    return {*asyncio.all_tasks(), *(t for t in threading.enumerate() if t.name == "agentrl function")}


async def _wait_for_rest(before: set[object]) -> set[object]:
    """Return the tasks and threads that are new and still there when patience is at its end."""
    left: set[object] = set()
    for _ in range(20):
        if not (left := _running() - before):
            break
        await anyio.sleep(PATIENCE_S / 20)
    return left
