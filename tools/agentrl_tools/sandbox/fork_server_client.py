"""The client of the sandbox: one fork server, any number of sessions, a result for each piece of code."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from agentrl import InfraError, UserError
from agentrl_tools.sandbox.launch import Launch, SandboxKind, SandboxLimits, choose_launch, close_launch
from agentrl_tools.sandbox.process import end_process, kill_and_read_stderr, start_process
from agentrl_tools.sandbox.session import Session

START_S = 60.0
GRACE_S = 5.0  # that the server may be late with its answer; then it is started again


@dataclass(frozen=True)
class CodeResult:
    """``status`` is ``ok``, ``raised``, ``timeout``, ``ended`` (by its own exit), ``lost``, or ``died SIGNAL``."""

    status: str
    output: str
    cut: int  # bytes that were too many


class ForkServerClient:
    """A sandbox: a fork server, started again where it ends.

    Attributes:
        walls: a line that says which walls stand here, and which do not; known when it is open.
    """

    def __init__(self, launch: Launch, limit: int) -> None:
        self.launch = launch
        self.slots = asyncio.Semaphore(limit)
        self.numbers = count()
        self.waiting: dict[int, asyncio.Future[CodeResult]] = {}
        self.process: asyncio.subprocess.Process | None = None
        self.reader: asyncio.Task[None] | None = None
        self.starting = asyncio.Lock()
        self.generation = 0
        self.walls = ""

    async def run(
        self, code: str, *, session: str | None = None, timeout_s: float = 5.0, old: int | None = None
    ) -> CodeResult:
        """Run code: in a session that lasts until ``end``, or, without one, in one for this alone.

        Args:
            old: the generation of the server that the session began with; ``lost`` where that server is no more.

        Raises:
            InfraError: the sandbox is gone (``sandbox_gone``), or has no room for another session (``sandbox_full``).
        """
        async with self.slots:
            await self._ensure_started()
            if old is not None and old != self.generation:
                return CodeResult("lost", "", 0)
            number = next(self.numbers)
            request = {"id": number, "session": session or f"-{number}", "code": code, "timeout_s": timeout_s}
            request |= {"keep": session is not None, "old": old is not None}
            self.waiting[number] = future = asyncio.get_running_loop().create_future()
            try:
                self._send(request)
                result: CodeResult = await asyncio.wait_for(future, timeout_s + GRACE_S)
            except TimeoutError:
                await self.stop()
                raise InfraError("sandbox_gone", f"the sandbox did not answer in {timeout_s + GRACE_S:g} s") from None
            except asyncio.CancelledError:
                self._send({"end": request["session"]})
                raise
            finally:
                self.waiting.pop(number, None)
        if result.status == "refused":
            raise InfraError("sandbox_full", f"the sandbox cannot run this: {result.output}")
        return result

    def session(self) -> Session:
        """Return a session: a Python whose variables and files last. It takes a process with its first call."""
        return Session(self)

    async def end(self, session: str) -> None:
        """End a session: its process, its variables and its files."""
        self._send({"end": session})

    def _send(self, request: dict[str, Any]) -> None:
        if self.process is not None and self.process.stdin is not None and not self.process.stdin.is_closing():
            self.process.stdin.write(json.dumps(request).encode() + b"\n")

    async def _ensure_started(self) -> None:
        async with self.starting:
            if self.process is None or self.process.returncode is not None or self.reader is None or self.reader.done():
                await self.stop()
                await self._start()

    async def _start(self) -> None:
        launch = self.launch
        env = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"} if launch.kind == "landlock" else {}
        self.process = await start_process(launch, env, limit=1 << 26)
        self._send(dict(launch.settings))
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), START_S)
        except TimeoutError:
            line = b""
        answer = json.loads(line) if line else {"error": await kill_and_read_stderr(self.process) or "it said nothing"}
        if "error" in answer:
            await self.stop()
            raise UserError(f"the sandbox ({launch.kind}) does not start: {answer['error']}")
        self.walls = _describe_walls(launch, answer)
        self.generation += 1
        self.reader = asyncio.create_task(self._read(self.process.stdout))

    async def _read(self, answers: asyncio.StreamReader) -> None:
        try:
            while line := await answers.readline():
                answer = json.loads(line)
                future = self.waiting.get(answer.pop("id"))
                if future is not None and not future.done():
                    future.set_result(CodeResult(**answer))
        finally:
            for future in self.waiting.values():
                if not future.done():
                    future.set_exception(InfraError("sandbox_gone", "the sandbox ended in mid-call"))

    async def check(self) -> None:
        """Run 1 + 1. Raises UserError if it does not come out."""
        found = await self.run("1 + 1", session=None, timeout_s=START_S)
        if found.output.strip() != "2":
            raise UserError(
                f"the sandbox ({self.launch.kind}) does not work here: {found.status} {found.output.strip()}"
            )

    async def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            await end_process(process)
        if self.reader is not None:
            self.reader.cancel()
            await asyncio.wait({self.reader})
            self.reader = None

    async def close(self) -> None:
        await self.stop()
        close_launch(self.launch)


def get_default_concurrency() -> int:
    """Return how many pieces of code may run at once: twice the cores."""
    return 2 * (os.cpu_count() or 1)


@asynccontextmanager
async def open_fork_server(launch: Launch, limit: int | None = None) -> AsyncIterator[ForkServerClient]:
    """Start a sandbox now, so that what is wrong shows now.

    Args:
        limit: pieces of code that run at once; twice the cores by default.
    """
    sandbox = ForkServerClient(launch, limit or get_default_concurrency())
    try:
        await sandbox.check()
        yield sandbox
    finally:
        await sandbox.close()


@asynccontextmanager
async def open_sandbox(
    kind: SandboxKind = "auto",
    *,
    limits: SandboxLimits | None = None,
    packages: Sequence[str] = (),
    interpreter: str | None = None,
    max_concurrency: int | None = None,
) -> AsyncIterator[ForkServerClient]:
    """Open a sandbox for Python code, and close it with all that is in it.

    Args:
        kind: ``bubblewrap``, ``landlock``, or the better of the two that works here.
        limits: of each session.
        packages: imported beforehand, where they are installed: a call that imports them is as fast as another.
        interpreter: another Python, whose packages the code may import.
        max_concurrency: pieces of code that run at once; twice the cores by default. Others wait.

    Raises:
        UserError: there is no sandbox here; the sentence says why, and what to do.
    """
    start = choose_launch(kind, limits or SandboxLimits(), packages, interpreter)
    async with open_fork_server(start, max_concurrency) as sandbox:
        yield sandbox


def _describe_walls(launch: Launch, answer: dict[str, Any]) -> str:
    """Say which walls stand, from what the server told of itself, and which do not."""
    own = ["user"] if launch.lease is not None else []
    own += ["memory disk"] if answer["tmpfs"] else []
    stand = [
        launch.kind,
        f"own {' and '.join(own)} for each session" if own else "one user for all sessions",
        "seccomp",
    ]
    missing = [] if answer["tmpfs"] else ["no mounts of a session's own (folders are watched instead)"]
    if version := answer["landlock"]:
        stand.append(f"landlock {version}")
    else:
        missing.append("no landlock")
    missing.append("no cgroups (the memory of all sessions together is not limited)")
    return f"sandbox: {', '.join(stand)}; {', '.join(missing)}"
