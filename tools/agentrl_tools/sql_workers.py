"""The processes that run queries: as many as may run at once, each killed when a query does not end."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from agentrl import InfraError, ToolError

WORKER = Path(__file__).with_name("sql_worker.py")
GRACE_S = 1.0  # for a worker to end a query by itself
START_S = 20.0  # for a new one to open the database; DuckDB has to be imported
LONGEST_LINE = 4 << 20  # bytes of an answer, which is read in the event loop


class _SqlWorker:
    """One process, which answers one request after the other."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self._to = process, process.stdin
        self.warm = False
        self._from = BufferedByteReceiveStream(process.stdout)

    @classmethod
    async def start(cls) -> _SqlWorker:
        return cls(await anyio.open_process([sys.executable, "-P", str(WORKER)], stderr=DEVNULL))

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        await self._to.send(json.dumps(request).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await self._from.receive_until(b"\n", LONGEST_LINE))
        return answer

    async def warm_up(self, request: dict[str, Any]) -> None:
        """Open the database, so that it is not part of the first query's time."""
        with anyio.move_on_after(START_S):
            await self.ask({**request, "query": "SELECT 1"})
            self.warm = True
        if not self.warm:
            raise InfraError("sql_start", f"the database {request['database']!r} took over {START_S:g} s to open")

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        with anyio.CancelScope(shield=True):
            await self.process.aclose()


class WorkerPool:
    """Started when they are first needed, and kept."""

    def __init__(self, most: int) -> None:
        self._slots = anyio.CapacityLimiter(most)
        self._idle: list[_SqlWorker] = []

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ask a free worker and return its answer.

        Raises:
            ToolError: the query took too long, or more memory than there is for it.
            InfraError: a worker could not be started.
        """
        async with self._slots:
            worker, whole = self._idle.pop() if self._idle else await _SqlWorker.start(), False
            try:
                if not worker.warm:
                    await worker.warm_up(request)
                with anyio.move_on_after(request["timeout_s"] + GRACE_S) as scope:
                    answer = await worker.ask(request)
                    whole = True
            except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
                raise ToolError("the query ended the process that ran it: it took too much memory") from None
            except anyio.DelimiterNotFound:
                raise ToolError(f"the query's result has over {LONGEST_LINE >> 20} MiB") from None
            finally:
                if whole:
                    self._idle.append(worker)
                else:
                    await worker.kill()
        if scope.cancelled_caught or answer.get("late"):
            raise ToolError(f"the query took over {request['timeout_s']:g} s, and was stopped")
        return answer

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().kill()


@asynccontextmanager
async def open_workers(most: int) -> AsyncIterator[WorkerPool]:
    workers = WorkerPool(most)
    try:
        yield workers
    finally:
        await workers.close()
