"""A worker process that answers lines of JSON, many at once: the first line it says is its greeting.

A line on stdin asks (``id``, and more) or cancels (``id``, ``cancel``); a line on stdout answers (``id``, and more), or
says at once that a cancellation was heard (``id``, ``heard``): who does not hear it holds up all that it was asked, and
is ended. A greeting with ``refused`` is a sentence on why it cannot work.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import anyio
from anyio.abc import Process, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream

from agentrl.agents.orphan_watch import OrphanWatch
from agentrl.agents.proxies import exempt_loopback
from agentrl.errors import UserError
from agentrl.runtime.threads import open_task_group

_LONGEST = 1 << 28  # bytes of a worker's line
_HEARS_S = 30.0  # a busy machine is slow
_ORPHANED_S = 10.0  # of workers whose run was killed, to end by themselves
_DEAF = (
    "its worker process was ended: it did not hear that an episode was cancelled, so something in it, such as "
    "time.sleep, holds up its event loop, and with it all episodes there"
)
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, anyio.IncompleteRead, OSError)


class WorkerLost(Exception):
    """The worker's process ended before it answered.

    Args:
        first: of those that the same end left without an answer.
    """

    def __init__(self, sentence: str, *, first: bool = True) -> None:
        super().__init__(sentence)
        self.first = first


class LineWorker:
    """One process, and what it is asked. Where it ends, another one is started when it is asked again.

    Args:
        what: a sentence calls it so.
        command: that starts it.
        environment: beside that of this process.
        grace_s: it has so long to end by itself, once its stdin has ended.
    """

    def __init__(
        self, what: str, command: Sequence[str], environment: Mapping[str, str] | None = None, *, grace_s: float = 0.0
    ) -> None:
        self.what, self.command, self.grace_s = what, list(command), grace_s
        self.environment = dict(environment or {})
        self.tasks: TaskGroup | None = None
        self.orphans: OrphanWatch | None = None
        self.waiting: dict[int, _Waiting] = {}
        self._unheard: dict[int, anyio.Event] = {}  # cancellations
        self._deaf: Process | None = None
        self.greeting: dict[str, Any] = {}
        self._process: Process | None = None
        self._has_worked = False
        self._starting = anyio.Lock()
        self._numbers = count()

    @property
    def load(self) -> tuple[int, int]:
        """Cancellations that it has not heard, and what it is asked: who has least is asked next."""
        return len(self._unheard), len(self.waiting)

    async def start(self) -> None:
        """Start the process where there is none, and wait for its greeting.

        Raises:
            UserError: it refuses, or ended as it began.
            WorkerLost: it ended as it began, and one before it did not.
        """
        async with self._starting:
            if self._process is not None:
                return
            assert self.tasks is not None
            process = await anyio.open_process(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None,
                env={**os.environ, **exempt_loopback(), **self.environment},
                start_new_session=True,
            )
            if self.orphans is not None:
                self.orphans.begin(process.pid)
            assert process.stdout is not None
            lines = BufferedByteReceiveStream(process.stdout)
            try:
                self.greeting = await _read(lines)
                if "refused" in self.greeting:
                    raise UserError(self.greeting["refused"])
            except BaseException as error:
                if self.grace_s and isinstance(error, anyio.get_cancelled_exc_class()):
                    with suppress(ProcessLookupError):  # it does not read its stdin yet
                        process.send_signal(signal.SIGINT)
                await self._end(process, self.grace_s)
                if isinstance(error, _GONE):
                    sentence = f"{self.what}: its worker process ended as it began"
                    raise (WorkerLost if self._has_worked else UserError)(sentence) from None
                raise
            self._process, self._has_worked = process, True
            self.tasks.start_soon(self._read_answers, process, lines)

    async def ask(self, message: Mapping[str, object]) -> dict[str, Any]:
        """Ask the process; return its answer. Where the caller is cancelled, the process is told.

        Raises:
            WorkerLost: it ended.
        """
        await self.start()
        number = next(self._numbers)
        waiting = self.waiting[number] = _Waiting(self._process)
        try:
            await self._send({"id": number, **message})
            await waiting.event.wait()
            if waiting.lost is not None:
                raise waiting.lost
            return waiting.answer
        except anyio.get_cancelled_exc_class():
            assert self.tasks is not None
            self.tasks.start_soon(self._cancel, waiting.process, number)
            raise
        finally:
            del self.waiting[number]

    async def _cancel(self, process: Process | None, number: int) -> None:
        """Tell the process that who asked is gone; end the process where it does not hear that."""
        heard = self._unheard[number] = anyio.Event()
        try:
            with anyio.move_on_after(_HEARS_S):
                await self._send({"id": number, "cancel": True})
                await heard.wait()
        finally:
            del self._unheard[number]
        if not heard.is_set() and process is not None and process is self._process:
            self._deaf = process
            _kill(process)  # who reads its answers finds out

    async def _read_answers(self, process: Process, lines: BufferedByteReceiveStream) -> None:
        with suppress(*_GONE):
            while True:
                answer = await _read(lines)
                if "heard" in answer:
                    if heard := self._unheard.get(answer["id"]):
                        heard.set()
                elif waiting := self.waiting.get(answer.get("id", -1)):
                    waiting.answer = answer
                    waiting.event.set()
        if self._process is process:
            self._process = None
        lost = [w for w in self.waiting.values() if w.process is process and not w.event.is_set()]
        await self._end(process)
        why = _DEAF if process is self._deaf else "its worker process ended"
        for place, waiting in enumerate(lost):
            waiting.lost = WorkerLost(why, first=not place)
            waiting.event.set()

    async def _send(self, message: Mapping[str, object]) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(*_GONE):  # who reads its answers finds out
                await self._process.stdin.send((json.dumps(message) + "\n").encode())

    async def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await self._end(process, self.grace_s)

    async def _end(self, process: Process, grace_s: float = 0.0) -> None:
        """End a process and all that it started."""
        with anyio.CancelScope(shield=True):
            if grace_s and process.stdin is not None:
                await process.stdin.aclose()
                with anyio.move_on_after(grace_s):
                    await process.wait()
            _kill(process)
            await process.wait()
            await process.aclose()
            if self.orphans is not None:
                self.orphans.forget(process.pid)


@asynccontextmanager
async def tend_workers(workers: Sequence[LineWorker]) -> AsyncIterator[None]:
    """Let workers be started in the block; leaving it ends them. Where this process is killed, they end too."""
    orphans = OrphanWatch(_ORPHANED_S)
    try:
        async with open_task_group() as tasks:
            for worker in workers:
                worker.tasks, worker.orphans = tasks, orphans
            try:
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    async with open_task_group() as ending:
                        for worker in workers:
                            ending.start_soon(worker.stop)
                tasks.cancel_scope.cancel()
    finally:
        orphans.close()


class _Waiting:
    """A caller that waits for an answer of a process."""

    def __init__(self, process: Process | None) -> None:
        self.process = process
        self.event = anyio.Event()
        self.answer: dict[str, Any] = {}
        self.lost: WorkerLost | None = None


async def _read(lines: BufferedByteReceiveStream) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(await lines.receive_until(b"\n", _LONGEST))
    return answer


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # asyncio's own kill may take its status from who waits for it
