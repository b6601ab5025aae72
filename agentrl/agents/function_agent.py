"""An async function that plays episodes, in a few worker processes, each of which plays many at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Self

import anyio
from anyio.abc import Process, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream

from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.errors import UserError
from agentrl.runtime.threads import open_task_group

_LONGEST = 1 << 26  # bytes of a worker's line
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, anyio.IncompleteRead, OSError)


class FunctionAgent:
    """An agent that is a function: ``FILE.py:NAME`` or ``module:NAME``.

    A worker that dies takes its episodes with it, by the world's fault, and another one is started for the next. Where
    that one dies as it begins, it is the world's fault again; where the first one does, nobody can play.

    Args:
        workers: processes.
    """

    def __init__(self, target: str, workers: int = 2) -> None:
        self.target = target
        self._workers = [_FunctionWorker(target) for _ in range(workers)]
        self._numbers = count()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Start the workers. Raises UserError: the function cannot be imported."""
        async with open_task_group() as tasks:
            try:
                async with open_task_group() as starting:
                    for worker in self._workers:
                        worker.tasks = tasks
                        starting.start_soon(worker.start)
                yield self
            finally:
                with anyio.CancelScope(shield=True):
                    for worker in self._workers:
                        await worker.stop()
                tasks.cancel_scope.cancel()

    async def run(self, task: AgentTask) -> AgentEnding:
        worker = min(self._workers, key=lambda w: len(w.waiting))
        return await worker.run(next(self._numbers), task)


class _FunctionWorker:
    """One process, and the episodes that it plays."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.tasks: TaskGroup | None = None
        self.waiting: dict[int, _Waiting] = {}
        self._process: Process | None = None
        self._has_played = False
        self._starting = anyio.Lock()

    async def start(self) -> None:
        """Start the process where there is none, and wait until it has the function.

        Raises:
            UserError: it cannot be imported.
            ProcessLookupError: the process ended as it began.
        """
        async with self._starting:
            if self._process is not None:
                return
            assert self.tasks is not None
            path = os.pathsep.join(p for p in (str(Path.cwd()), os.environ.get("PYTHONPATH", "")) if p)
            process = await anyio.open_process(
                [sys.executable, "-m", "agentrl.agents.worker", self.target],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
            assert process.stdout is not None
            lines = BufferedByteReceiveStream(process.stdout)
            try:
                first = await _read(lines)
                if "refused" in first:
                    raise UserError(first["refused"])
            except BaseException as error:
                await _end(process)
                if isinstance(error, _GONE):
                    sentence = f"agent {self.target!r}: its worker process ended as it began"
                    raise (ProcessLookupError if self._has_played else UserError)(sentence) from None
                raise
            self._process, self._has_played = process, True
            self.tasks.start_soon(self._read_answers, process, lines)

    async def run(self, number: int, task: AgentTask) -> AgentEnding:
        """Play an episode."""
        try:
            await self.start()
        except ProcessLookupError as error:
            return AgentEnding(str(error), killed=True)
        waiting = self.waiting[number] = _Waiting(self._process)
        try:
            await self._send({"id": number, "task": task.to_json()})
            await waiting.event.wait()
            return waiting.ending
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._send({"id": number, "cancel": True})
            raise
        finally:
            del self.waiting[number]

    async def _read_answers(self, process: Process, lines: BufferedByteReceiveStream) -> None:
        with suppress(*_GONE):
            while True:
                answer = await _read(lines)
                if waiting := self.waiting.get(answer["id"]):
                    waiting.end(AgentEnding(answer["error"], answer["trace"]))
        if self._process is process:
            self._process = None
        lost = [w for w in self.waiting.values() if w.process is process and not w.event.is_set()]
        await _end(process)
        for place, waiting in enumerate(lost):
            waiting.end(AgentEnding("its worker process ended", killed=True, counted=not place))

    async def _send(self, message: dict[str, object]) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(*_GONE):  # who reads its answers finds out
                await self._process.stdin.send((json.dumps(message) + "\n").encode())

    async def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)


class _Waiting:
    """An episode that a worker's process plays."""

    def __init__(self, process: Process | None) -> None:
        self.process = process
        self.event, self.ending = anyio.Event(), AgentEnding()

    def end(self, ending: AgentEnding) -> None:
        self.ending = ending
        self.event.set()


async def _read(lines: BufferedByteReceiveStream) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(await lines.receive_until(b"\n", _LONGEST))
    return answer


async def _end(process: Process) -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # asyncio's own kill may take its status from who waits for it
    with anyio.CancelScope(shield=True):
        await process.wait()
        await process.aclose()
