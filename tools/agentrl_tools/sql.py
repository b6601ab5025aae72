"""sql: a database that can be read and not changed, with limits of time, rows and size."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from agentrl import ContractError, ToolError, Toolset, UserError, tool
from agentrl.tools.tool import Tool
from agentrl_tools.database import DUCKDB, Database
from agentrl_tools.sql_workers import open_workers


class Sql(Toolset):
    """Query a SQLite or DuckDB database, which is never changed.

    Args:
        database: a file; DuckDB's ends with .duckdb or .ddb.
        max_rows: a longer result is cut, and says so.
        max_chars: of one value; a longer one is cut, and says so.
        timeout_s: seconds; a query that takes longer is stopped.
        workers: processes that run queries; by default as many as there are cores.
    """

    named_by = "database"

    def __init__(
        self,
        database: str | Path,
        max_rows: int = 50,
        max_chars: int = 300,
        timeout_s: float = 5.0,
        workers: int | None = None,
    ) -> None:
        if max_rows < 1 or max_chars < 1 or not 0 < timeout_s <= 30 or (workers is not None and workers < 1):
            raise ContractError(
                "tool 'sql': max_rows, max_chars and workers are 1 or more, timeout_s is over 0 and at most 30; not "
                f"{max_rows}, {max_chars}, {workers} and {timeout_s:g}"
            )
        self.database, self.max_rows, self.max_chars, self.timeout_s = Path(database), max_rows, max_chars, timeout_s
        self.workers = workers or os.cpu_count() or 1

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Database]:
        if not self.database.is_file():
            raise UserError(f"no database {str(self.database)!r}: there is no such file (from {Path.cwd()})")
        if self.database.suffix in DUCKDB and importlib.util.find_spec("duckdb") is None:
            raise UserError("a DuckDB database needs the package duckdb: pip install 'agentrl-gym[duckdb]'")
        async with open_workers(self.workers) as workers:
            database = Database(self.database.resolve(), workers, self.max_rows, self.max_chars, self.timeout_s)
            try:
                await database.schema()
            except ToolError as error:
                raise UserError(f"cannot read the database {str(self.database)!r}: {error}") from None
            yield database

    @property
    def tool_list(self) -> Sequence[Tool]:
        """Limit calls to the number of workers: waiting for one is not part of a call's time."""
        return [replace(t, max_concurrency=self.workers) for t in super().tool_list]

    @tool(timeout_s=60)
    async def sql(self, query: str) -> str:
        """Run a query on the database.

        Args:
            query: one SELECT statement.
        """
        found: str = await self.shared.query(query)
        return found

    @tool(timeout_s=60)
    async def schema(self) -> str:
        """The tables of the database."""
        found: str = await self.shared.schema()
        return found
