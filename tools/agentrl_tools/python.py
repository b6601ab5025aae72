"""python: the model's code in a real interpreter, where it can do no harm."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Literal, Self

from agentrl import InfraError, Tool, ToolError, Toolset, tool
from agentrl.tools.toolset import fork_error
from agentrl_tools.sandbox import fork_server_client, launch, monty

MAX_CHARS = 20_000
_numbers = count()


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
        limits = launch.SandboxLimits(memory_mb=self.memory_mb)
        async with AsyncExitStack() as held:
            if self.sandbox == "monty":
                pool = await held.enter_async_context(monty.open_monty(limits, self.timeout_s, self.max_concurrency))
                yield _Interpreters(pool, None, ())
                return
            start = launch.choose_launch(self.sandbox, limits, (), self.interpreter)
            warm = launch.choose_launch(self.sandbox, limits, self.packages, self.interpreter)
            light = await held.enter_async_context(fork_server_client.open_fork_server(start, self.max_concurrency))
            heavy = await held.enter_async_context(fork_server_client.open_fork_server(warm, self.max_concurrency))
            yield _Interpreters(light, heavy, self.packages)

    def begin(self) -> None:
        self.session = f"episode-{next(_numbers)}" if self.state else None
        self.mine: fork_server_client.ForkServerClient | monty.MontyPool | None = None  # where the variables are
        self.generation = 0
        self.turn = asyncio.Lock()

    def fork(self) -> Self:
        if self.state:
            raise fork_error(self, "with state = true its variables are in a process, which cannot be copied")
        return self.start_episode(self.shared)

    async def close(self) -> None:
        if self.session is not None and self.mine is not None:
            await self.mine.end(self.session)

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
        async with self.turn if self.state else contextlib.nullcontext():  # the calls of a turn run together
            result = await self._run(code)
        return format_result(result, self.timeout_s, self.state)

    async def _run(self, code: str) -> fork_server_client.CodeResult:
        sandbox = self.mine or self.shared.of(code)
        old = self.generation if self.mine is not None else None
        result: fork_server_client.CodeResult = await sandbox.run(
            code, session=self.session, timeout_s=self.timeout_s, old=old
        )
        if result.status == "lost":
            raise InfraError("sandbox_gone", "the sandbox was started again, and the episode's variables are lost")
        if self.session is not None:
            kept = result.status in ("ok", "raised")
            self.mine, self.generation = (sandbox, sandbox.generation) if kept else (None, 0)
        return result


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
