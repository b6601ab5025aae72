"""The call of a tool in an episode: its arguments are checked, its limit, circuit breaker and deadline hold.

The order is: check the arguments, wait for a free slot within ``Tool.max_concurrency``, fail at once while the circuit
breaker is open, then call. ``Tool._run_with_timeout`` holds the deadline of one attempt, ``Tool.__call__`` retries.
`provenance` finds out whether a call that failed for good was itself at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import anyio
import anyio.lowlevel

from agentrl.errors import InfraError, ToolError, UserError
from agentrl.tools.circuit_breaker import OPEN, get_circuit_breaker
from agentrl.tools.provenance import describe_provoked, get_call_history
from agentrl.tools.tool import Tool
from agentrl.types import to_utf8_json


async def call_tool(tool: Tool, arguments: Mapping[str, Any], episode: int | None = None) -> str:
    """Call a tool and return its result as text for the model.

    Args:
        episode: its number; without one nothing is a provoked failure.

    Raises:
        ToolError: the arguments are wrong, the tool says no, or it failed on this request and works otherwise.
        InfraError: it failed, or its circuit breaker is open.
        ContractError: its result is neither text nor JSON; of a process that has served other episodes it is provoked.
    """
    try:
        checked = await tool.check_off_loop(to_utf8_json(arguments))  # JSON lets a model write half a character
    except RecursionError:
        raise ToolError(f"bad arguments for {tool.name}: they are nested too deep", kind="arguments") from None
    if episode is None:
        return await _call_guarded(tool, checked)
    history = get_call_history(tool.name)
    try:
        result = await _call_guarded(tool, checked)
    except ToolError:
        history.record(episode, succeeded=True)
        raise
    except UserError as error:
        if not (tool.process and history.works_for_others(episode)):
            raise
        # The process ran what a model wrote, which may speak in the tool's name: it ends no run by a sentence.
        history.record(episode, succeeded=False)
        raise describe_provoked(tool.name, InfraError("tool_contract", str(error))) from error
    except InfraError as fault:
        if fault.kind == OPEN:
            fault.provoked = False
            raise
        history.record(episode, succeeded=False)
        fault.provoked = await history.is_provoked(fault, episode, tool.make_health_check())
        if not fault.provoked:
            raise
        if tool.max_consecutive_failures is not None:
            get_circuit_breaker(tool.name, tool.max_consecutive_failures, tool.cooldown_s).failures = 0
        raise describe_provoked(tool.name, fault) from fault
    history.record(episode, succeeded=True)
    return result


async def _call_guarded(tool: Tool, checked: dict[str, Any]) -> str:
    """Call a tool within its limit of calls and its circuit breaker."""
    async with AsyncExitStack() as held:
        if (limiter := _limiter(tool)) is not None:
            await held.enter_async_context(limiter)
        if tool.max_consecutive_failures is not None:
            breaker = get_circuit_breaker(tool.name, tool.max_consecutive_failures, tool.cooldown_s)
            await held.enter_async_context(breaker.guard())
        return await tool(**checked)


# One run is one event loop: a tool's limit is shared by all environments of the run.
_limiters = anyio.lowlevel.RunVar[dict[str, anyio.CapacityLimiter]]("agentrl_tool_limits")


# Of a process that has a part of a run's episodes: makes the wait for one of the calls that all of them may make.
MakeLimit = Callable[[str, int], AbstractAsyncContextManager[object]]
_shared_limit = anyio.lowlevel.RunVar[MakeLimit | None]("agentrl_shared_tool_limit")


def share_limits(make: MakeLimit) -> None:
    """Let each call of a tool with ``max_concurrency`` wait within ``make(name, limit)``, in this event loop."""
    _shared_limit.set(make)


def _limiter(tool: Tool) -> AbstractAsyncContextManager[object] | None:
    if tool.max_concurrency is None:
        return None
    if (make := _shared_limit.get(None)) is not None:
        return make(tool.name, tool.max_concurrency)
    try:
        limiters = _limiters.get()
    except LookupError:
        _limiters.set(limiters := {})
    return limiters.setdefault(tool.name, anyio.CapacityLimiter(tool.max_concurrency))
