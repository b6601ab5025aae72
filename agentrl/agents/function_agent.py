"""An async function that plays episodes, in a few worker processes, each of which plays many at once."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.agents.line_worker import LineWorker, WorkerLost, tend_workers
from agentrl.runtime.threads import open_task_group


class FunctionAgent:
    """An agent that is a function: ``FILE.py:NAME`` or ``module:NAME``.

    A worker that dies takes its episodes with it, by the world's fault, and another one is started for the next. Where
    that one dies as it begins, it is the world's fault again; where the first one does, nobody can play.

    Args:
        workers: processes.
    """

    def __init__(self, target: str, workers: int = 2) -> None:
        self.target = target
        path = os.pathsep.join(p for p in (str(Path.cwd()), os.environ.get("PYTHONPATH", "")) if p)
        command = [sys.executable, "-m", "agentrl.agents.worker", target]
        self._workers = [LineWorker(f"agent {target!r}", command, {"PYTHONPATH": path}) for _ in range(workers)]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Start the workers. Raises UserError: the function cannot be imported."""
        async with tend_workers(self._workers):
            async with open_task_group() as starting:
                for worker in self._workers:
                    starting.start_soon(worker.start)
            yield self

    async def run(self, task: AgentTask) -> AgentEnding:
        worker = min(self._workers, key=lambda w: w.load)
        try:
            answer = await worker.ask({"task": task.to_json()})
        except WorkerLost as lost:
            return AgentEnding(str(lost), killed=True, counted=lost.first)
        return AgentEnding(answer["error"], answer["trace"])
