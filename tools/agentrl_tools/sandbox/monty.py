"""Monty, a Python written in Rust, as a sandbox: microseconds a call, a part of the language, no packages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from agentrl import InfraError, UserError
from agentrl_tools.sandbox import fork_server_client
from agentrl_tools.sandbox.fork_server_client import CodeResult
from agentrl_tools.sandbox.launch import SandboxLimits

GRACE_S = 2.0


class MontyPool:
    """A pool of workers, one for each session that lasts."""

    def __init__(self, pool: Any, limits: SandboxLimits) -> None:
        self.pool, self.limits = pool, limits
        self.kept: dict[str, tuple[Any, AsyncExitStack]] = {}
        self.generation = 1

    async def run(self, code: str, *, session: str | None, timeout_s: float, old: int | None = None) -> CodeResult:
        """Run code as `ForkServerClient.run` does."""
        import pydantic_monty as monty

        printed = monty.CollectString(self.limits.output_bytes)
        async with AsyncExitStack() as held:
            worker = await self._worker(session, held, timeout_s)
            try:
                value = await worker.feed_run(code, print_callback=printed)
            except monty.MontyCrashedError as crash:
                await self.end(session)
                status = "timeout" if crash.timed_out else "died"
                return CodeResult(status, printed.output, 0)
            except monty.MontyDisconnectError as error:
                raise InfraError("sandbox_gone", f"monty's worker is gone: {error}") from None
            except monty.MontyError as error:
                if "time limit" in str(error).lower() or isinstance(error.exception(), TimeoutError):
                    await self.end(session)
                    return CodeResult("timeout", printed.output, 0)
                shown = error.display() if hasattr(error, "display") else str(error)
                return CodeResult("raised", f"{printed.output}{shown}\n", 0)
        shown = "" if value is None else f"{value!r}\n"
        return CodeResult("ok", printed.output + shown, 0)

    async def _worker(self, session: str | None, held: AsyncExitStack, timeout_s: float) -> Any:
        if session is not None and session in self.kept:
            return self.kept[session][0]
        limits = {"max_feed_duration_secs": timeout_s, "max_memory": self.limits.memory_mb << 20}
        stack = held if session is None else AsyncExitStack()
        made = await stack.enter_async_context(self.pool.checkout(limits=limits, os_policy={"sleep": "zero"}))
        if session is not None:
            self.kept[session] = (made, stack)
        return made

    async def end(self, session: str | None) -> None:
        if session is not None and (kept := self.kept.pop(session, None)) is not None:
            await kept[1].aclose()


@asynccontextmanager
async def open_monty(limits: SandboxLimits, timeout_s: float, limit: int | None = None) -> AsyncIterator[MontyPool]:
    """Open a pool of workers. Raises UserError if pydantic-monty is not installed."""
    try:
        from pydantic_monty import AsyncMonty
    except ImportError:
        raise UserError(
            "tool.python.sandbox monty needs the package pydantic-monty: pip install 'agentrl-gym[monty]'"
        ) from None
    async with AsyncMonty(
        max_processes=limit or fork_server_client.get_default_concurrency(), request_timeout=timeout_s + GRACE_S
    ) as pool:
        monty_pool = MontyPool(pool, limits)
        try:
            yield monty_pool
        finally:
            for session in list(monty_pool.kept):
                await monty_pool.end(session)
