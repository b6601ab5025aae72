"""sql-qa: questions that a database answers, which has to be asked in SQL."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from agentrl_tools.database import Database
from agentrl_tools.sql_workers import WorkerPool, open_workers

from agentrl import ContractError, Message, ToolCall, ToolEnv, Trajectory, tool
from agentrl.runtime.threads import run_in_thread
from agentrl.types import ExpertTurn, Observation
from agentrl_envs import sql_qa_tasks
from agentrl_envs.rewards import extract_boxed, is_same_answer

MAX_ROWS = 20
TIMEOUT_S = 2.0
WORKERS = 16
ANSWERS = ("The answer is \\boxed{{{}}}.", "\\boxed{{{}}}")


class _SqlShared(NamedTuple):
    folder: Path  # of the databases, one an episode
    workers: WorkerPool


class SqlQA(ToolEnv):
    r"""A database of its own for each task, and a question; the answer goes in ``\boxed{}``.

    Args:
        families: which kinds of database, of ``shop``, ``school`` and ``library``; all by default.
        show_schema: whether the tables are told with the question. Otherwise there is a tool to ask for them.
    """

    system_prompt = sql_qa_tasks.SYSTEM_PROMPT
    max_turns = 6

    def __init__(self, families: Sequence[str] | None = None, show_schema: bool = False) -> None:
        super().__init__()
        self.families, self.show_schema = families, show_schema
        self.path: Path | None = None

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **_: Any) -> AsyncIterator[_SqlShared]:
        with tempfile.TemporaryDirectory(prefix="agentrl-sql-qa-", ignore_cleanup_errors=True) as folder:
            async with open_workers(min(WORKERS, os.cpu_count() or 1)) as workers:
                yield _SqlShared(Path(folder), workers)

    @tool(max_concurrency=WORKERS, timeout_s=60)
    async def sql(self, query: str) -> str:
        """Run a query on the database.

        Args:
            query: one SELECT statement.
        """
        return await self.database.query(query)

    @tool(max_concurrency=WORKERS, timeout_s=60)
    async def schema(self) -> str:
        """The tables of the database."""
        return await self.database.schema()

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        split = (options or {}).get("split", "train")
        try:
            self.task = await run_in_thread(partial(sql_qa_tasks.draw, seed, split=split, families=self.families))
        except ValueError as error:
            raise ContractError(f"env 'sql-qa': {error}") from None
        self.path = self.shared.folder / f"{uuid4().hex}.db"
        await run_in_thread(partial(self.task.write, self.path))
        self.database = Database(self.path, self.shared.workers, max_rows=MAX_ROWS, timeout_s=TIMEOUT_S)
        tables = f"\n{self.task.script}" if self.show_schema else ""
        return self.ask(self.task.question + tables), {"family": self.task.family, "expected": self.task.answer}

    async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
        """Ask for the tables where they are not told, query, and answer what the result says."""
        rng = random.Random(self.task.question)
        if not self.show_schema:
            yield ToolCall.of("schema")
        told = yield ToolCall.of("sql", query=self.task.query)
        yield rng.choice(ANSWERS).format(told[-1]["content"].splitlines()[-1])

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        answer = extract_boxed(trajectory.answer)
        return {"correct": float(answer is not None and is_same_answer(answer.casefold(), self.task.answer.casefold()))}

    async def close(self) -> None:
        if self.path is not None:
            await run_in_thread(partial(self.path.unlink, missing_ok=True))
