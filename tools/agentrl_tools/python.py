"""python: the model's code in a real interpreter, where it can do no harm."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Literal, Self

from agentrl import InfraError, Tool, ToolError, Toolset, tool
from agentrl.tools.toolset import fork_error
from agentrl_tools import sandbox
from agentrl_tools.sandbox import fork_server_client, monty
from agentrl_tools.sandbox.session import Session

MAX_CHARS = 20_000


class _Interpreters:
    """A light fork server, and one with the packages warm for code that names one of them."""

    def __init__(
        self,
        light: fork_server_client.ForkServerClient | monty.MontyPool,
        warm: fork_server_client.ForkServerClient | None,
        packages: Sequence[str],
    ) -> None:
        self.light, self.warm = light, warm
        self.heavy = re.compile(rf"\b(?:{'|'.join(map(re.escape, packages))})\b") if packages else None

    def of(self, code: str) -> fork_server_client.ForkServerClient | monty.MontyPool:
        return self.warm if self.warm is not None and self.heavy and self.heavy.search(code) else self.light


class Python(Toolset):
    """Runs Python code under bubblewrap or landlock, seccomp, limits and an unprivileged user.

    Args:
        sandbox: ``bubblewrap``, ``landlock``, the better of the two (``auto``), or ``monty``, an interpreter in Rust.
        state: variables last from one call of an episode to the next.
        timeout_s: of a call; the model reads that it took too long.
        memory_mb: address space of a call.
        packages: imported beforehand, where they are installed.
        interpreter: another Python, whose packages the code may import.
        max_concurrency: calls that run at once; twice the cores by default.
    """

    def __init__(
        self,
        sandbox: Literal["auto", "bubblewrap", "landlock", "monty"] = "auto",
        state: bool = False,
        timeout_s: float = 5.0,
        memory_mb: int = 1024,
        packages: Sequence[str] = ("numpy", "sympy"),
        interpreter: str | None = None,
        max_concurrency: int | None = None,
    ) -> None:
        self.sandbox, self.state, self.timeout_s, self.memory_mb = sandbox, state, timeout_s, memory_mb
        self.packages, self.interpreter, self.max_concurrency = tuple(packages), interpreter, max_concurrency

    @asynccontextmanager
    async def open(self) -> AsyncIterator[_Interpreters]:
        limits = sandbox.SandboxLimits(memory_mb=self.memory_mb)
        async with AsyncExitStack() as held:
            if self.sandbox == "monty":
                pool = await held.enter_async_context(monty.open_monty(limits, self.timeout_s, self.max_concurrency))
                yield _Interpreters(pool, None, ())
                return
            light, warm = [
                await held.enter_async_context(
                    sandbox.open(
                        self.sandbox,
                        limits=limits,
                        packages=packages,
                        interpreter=self.interpreter,
                        max_concurrency=self.max_concurrency,
                    )
                )
                for packages in ((), self.packages)
            ]
            yield _Interpreters(light, warm, self.packages)

    def describe_shared(self, shared: _Interpreters) -> str | None:
        return shared.light.walls

    async def health_check(self) -> None:
        result = await self.shared.light.run("1 + 1", session=None, timeout_s=self.timeout_s)
        if result.status != "ok":
            raise InfraError("sandbox_gone", f"1 + 1 ends with {result.status}")

    def begin(self) -> None:
        self.turn = asyncio.Lock()
        self.session: Session | None = None  # in the interpreter that its first call needed

    def fork(self) -> Self:
        if self.state:
            raise fork_error(self, "with state = true its variables are in a process, which cannot be copied")
        return self.start_episode(self.shared)

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()

    @property
    def tool_list(self) -> Sequence[Tool]:
        places = self.max_concurrency or fork_server_client.get_default_concurrency()
        return [replace(t, timeout_s=self.timeout_s + 10, max_concurrency=places) for t in super().tool_list]

    @tool
    async def python(self, code: str) -> str:
        """Run Python code; what it prints, and the value of its last line, come back.

        Args:
            code: the code, such as "print(2**64)".
        """
        if len(code) > MAX_CHARS:
            raise ToolError(f"the code has {len(code)} characters; {MAX_CHARS} are the most")
        return format_result(await self._run(code), self.timeout_s, self.state)

    async def _run(self, code: str) -> fork_server_client.CodeResult:
        if not self.state:
            result: fork_server_client.CodeResult = await self.shared.of(code).run(
                code, session=None, timeout_s=self.timeout_s
            )
            return result
        async with self.turn:  # the calls of a turn run together
            if self.session is None or not self.session.is_alive:
                self.session = Session(self.shared.of(code))
            return await self.session.run(code, self.timeout_s)


def format_result(result: fork_server_client.CodeResult, timeout_s: float, state: bool = False) -> str:
    """Format a result for the model. Raises ToolError if the code failed."""
    cut = f"[{result.cut} more bytes left out]\n" if result.cut else ""
    output = result.output + cut
    kind, _, number = result.status.partition(" ")
    gone = ", and its variables are gone" if state else ""
    if kind == "raised":
        raise ToolError(output.rstrip("\n"))
    if kind == "timeout":
        raise ToolError(f"{output}it took over {timeout_s:g} s and was stopped{gone}")
    if kind == "died":
        by = f" by {signal.Signals(int(number)).name}" if number else ""
        raise ToolError(f"{output}the interpreter was ended{by}{gone}")
    return output.rstrip("\n")
