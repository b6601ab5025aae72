"""The call of a tool in an episode: its arguments are checked, its limit, circuit breaker and deadline hold.

The order is: check the arguments, wait for a free slot within ``Tool.max_concurrency``, fail at once while the circuit
breaker is open, then call. ``Tool._run_with_timeout`` holds the deadline of one attempt, ``Tool.__call__`` retries.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.lowlevel

from agentrl.tools.circuit_breaker import get_circuit_breaker
from agentrl.tools.tool import Tool
from agentrl.types import to_utf8_json


async def call_tool(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Call a tool and return its result as text for the model.

    Raises:
        ToolError: the arguments are wrong, or the tool says no.
        InfraError: it failed, or its circuit breaker is open.
        ContractError: its result is neither text nor JSON.
    """
    checked = tool.check(to_utf8_json(arguments))  # JSON lets a model write half a character
    async with AsyncExitStack() as held:
        if (limiter := _limiter(tool)) is not None:
            await held.enter_async_context(limiter)
        if tool.max_consecutive_failures is not None:
            breaker = get_circuit_breaker(tool.name, tool.max_consecutive_failures, tool.cooldown_s)
            await held.enter_async_context(breaker.guard())
        return await tool(**checked)


# One run is one event loop: a tool's limit is shared by all environments of the run.
_limiters = anyio.lowlevel.RunVar[dict[str, anyio.CapacityLimiter]]("agentrl_tool_limits")


def _limiter(tool: Tool) -> anyio.CapacityLimiter | None:
    if tool.max_concurrency is None:
        return None
    try:
        limiters = _limiters.get()
    except LookupError:
        _limiters.set(limiters := {})
    return limiters.setdefault(tool.name, anyio.CapacityLimiter(tool.max_concurrency))
