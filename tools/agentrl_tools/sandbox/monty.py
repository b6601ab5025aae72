"""Monty, a Python written in Rust, as a sandbox: under a millisecond a call, a part of the language, no packages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from agentrl import InfraError, UserError
from agentrl_tools.sandbox import fork_server_client
from agentrl_tools.sandbox.fork_server_client import CodeResult
from agentrl_tools.sandbox.launch import SandboxLimits

GRACE_S = 2.0  # that a worker may be late to stop by itself; then it is killed
SESSIONS = 4096  # a session has a worker, a process, of its own
RECURSION = 1000
MEMORY_MB = 256  # at most; an error's text comes here whole
WALLS = (
    "sandbox: monty, a process for each session, limits of time, memory, output and recursion, no files, no network; "
    "no walls around that process (its interpreter is the wall)"
)
# It has no value: one of nested lists that share their parts is small there, and endless here.
_PROGRAM = """\
_parses = False
try:
    exec("raise LookupError\\n" + _shown)
except LookupError:
    _parses = True
except Exception:
    pass
exec(_shown if _parses else _code)
None
"""


class MontyPool:
    """A pool of workers, one for each session that lasts.

    Attributes:
        walls: a line that says which walls stand here, and which do not.
    """

    walls = WALLS
    generation = 1

    def __init__(self, pool: Any, limits: SandboxLimits, limit: int) -> None:
        self.pool, self.limits = pool, limits
        self.slots = asyncio.Semaphore(limit)
        self.kept: dict[str, tuple[Any, AsyncExitStack]] = {}

    async def run(self, code: str, *, session: str | None, timeout_s: float, old: int | None = None) -> CodeResult:
        """Run code as `ForkServerClient.run` does. The value of the last line is printed inside."""
        if old is not None and session not in self.kept:
            return CodeResult("lost", "", 0)
        async with self.slots, AsyncExitStack() as held:
            worker = await self._worker(session, held, timeout_s)
            try:
                result, lasts = await self._feed(worker, code)
            except BaseException:
                await self.end(session)
                raise
            if not lasts:
                await self.end(session)
            return result

    async def _feed(self, worker: Any, code: str) -> tuple[CodeResult, bool]:
        """Run code in a worker. Return the result, and whether the worker is good for more."""
        import pydantic_monty as monty

        most = self.limits.output_bytes
        printed = monty.CollectString(most)
        inputs = {"_code": code, "_shown": _show_last_line(code)}
        try:
            await worker.feed_run(_PROGRAM, inputs=inputs, print_callback=printed)
        except monty.MontyCrashedError as crash:
            return CodeResult("timeout" if crash.timed_out else "died", printed.output, 0), False
        except monty.MontyDisconnectError as error:
            raise InfraError("sandbox_gone", f"monty's worker is gone: {error}") from None
        except monty.MontyError as error:
            message = str(error)
            if message.startswith("TimeoutError: feed time limit exceeded"):
                return CodeResult("timeout", printed.output, 0), False
            if message.startswith("MemoryError: ") and message.endswith(f"> {most} bytes"):
                stop = f"\n[over {most} bytes of output: the code was stopped]\n"
                return CodeResult("raised", printed.output + stop, 0), True
            shown = _format_error(error)
            text, cut = shown[:most], max(0, len(shown) - most)
            # a limit that no line of the code is blamed for is met by whatever comes next
            full = message.startswith("MemoryError: ") and not shown.startswith("Traceback")
            return CodeResult("died" if full else "raised", f"{printed.output}{text}\n", cut), not full
        return CodeResult("ok", printed.output, 0), True

    async def _worker(self, session: str | None, held: AsyncExitStack, timeout_s: float) -> Any:
        if session is not None and session in self.kept:
            return self.kept[session][0]
        limits = {
            "max_feed_duration_secs": timeout_s,
            "max_memory": min(self.limits.memory_mb, MEMORY_MB) << 20,
            "max_recursion_depth": RECURSION,
        }
        stack = held if session is None else AsyncExitStack()
        try:
            made = await stack.enter_async_context(self.pool.checkout(limits=limits, os_policy={"sleep": "zero"}))
        except (TimeoutError, OSError) as error:
            raise InfraError("sandbox_full", f"monty starts no worker for another session: {error}") from None
        if session is not None:
            self.kept[session] = (made, stack)
        return made

    async def end(self, session: str | None) -> None:
        """End a session: its process and its variables."""
        if session is not None and (kept := self.kept.pop(session, None)) is not None:
            await kept[1].aclose()


def _show_last_line(code: str) -> str:
    """Return the code with its last statement's value printed. It parses where that statement is an expression."""
    lines = code.split("\n")
    last = max((i for i, line in enumerate(lines) if line and line[0] not in " \t#)]}"), default=0)
    ending = [")", "if _value is not None: print(repr(_value))"]
    return "\n".join([*lines[:last], "_value = (" + "\n".join(lines[last:]), *ending])


def _format_error(error: Any) -> str:
    """Format a traceback, without the lines of our own program."""
    lines = error.display().split("\n")
    if len(lines) > 4 and lines[1].startswith('  File "<python-input-'):
        lines[1:4] = []
    return "\n".join(lines if len(lines) != 2 or lines[0] != "Traceback (most recent call last):" else lines[1:])


@asynccontextmanager
async def open_monty(limits: SandboxLimits, timeout_s: float, limit: int | None = None) -> AsyncIterator[MontyPool]:
    """Open a pool of workers, of which ``limit`` run at once. Raises UserError if pydantic-monty is not installed."""
    try:
        from pydantic_monty import AsyncMonty
    except ImportError:
        raise UserError(
            "tool.python.sandbox monty needs the package pydantic-monty: pip install 'agentrl-gym[monty]'"
        ) from None
    async with AsyncMonty(
        max_processes=SESSIONS,
        checkout_timeout=timeout_s + GRACE_S,
        request_timeout=timeout_s + GRACE_S,
        feed_duration_limit_grace=GRACE_S,
    ) as pool:
        monty_pool = MontyPool(pool, limits, limit or fork_server_client.get_default_concurrency())
        try:
            yield monty_pool
        finally:
            for session in list(monty_pool.kept):
                await monty_pool.end(session)
