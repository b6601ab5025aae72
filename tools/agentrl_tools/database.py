"""A database file as the model sees it: queries and their results as text, and the tables there are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import InfraError, ToolError
from agentrl_tools.sql_workers import WorkerPool

MAX_QUERY_CHARS = 10_000  # characters
MAX_TABLES, MAX_TABLE_CHARS = 200, 4000
DUCKDB = (".duckdb", ".ddb")
_SCHEMA = {
    True: "SELECT sql FROM (SELECT sql, table_oid AS n FROM duckdb_tables() WHERE NOT internal UNION ALL "
    "SELECT sql, view_oid FROM duckdb_views() WHERE NOT internal) ORDER BY n",
    False: "SELECT sql FROM sqlite_schema WHERE type IN ('table', 'view') AND sql IS NOT NULL "
    "AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY rowid",
}


@dataclass(frozen=True)
class Database:
    """A file, SQLite's or DuckDB's, that is read by ``workers`` and never changed.

    Args:
        max_rows: of a result; max_chars: of one value; timeout_s: seconds of a query.
    """

    path: Path
    workers: WorkerPool
    max_rows: int = 50
    max_chars: int = 300
    timeout_s: float = 5.0

    async def query(self, text: str) -> str:
        """Run a query; return a line of the columns' names, then a line a row, ``|`` between the values.

        Raises:
            ToolError: what the database says of the query, or that it took too long.
            InfraError: the database is gone.
        """
        if not text.strip() or len(text) > MAX_QUERY_CHARS:
            raise ToolError(f"a query has 1 to {MAX_QUERY_CHARS:,} characters, not {len(text):,}")
        answer = await self._ask(text, self.max_rows, self.max_chars)
        lines = ["|".join(_cell(value) for value in row) for row in (answer["columns"], *answer["rows"])]
        if not answer["rows"]:
            lines.append("(no rows)")
        if answer["more"]:
            lines.append(f"(there are more rows; these are the first {self.max_rows})")
        return "\n".join(lines)

    async def schema(self) -> str:
        """Return the CREATE statements, one a line. Raises as ``query``."""
        answer = await self._ask(_SCHEMA[self.path.suffix in DUCKDB], MAX_TABLES, MAX_TABLE_CHARS)
        return "\n".join(" ".join(sql.split()) for (sql,) in answer["rows"]) or "(no tables)"

    async def _ask(self, text: str, max_rows: int, max_chars: int) -> dict[str, Any]:
        if not self.path.is_file():
            raise InfraError("no_database", f"the database {str(self.path)!r} is gone")
        request = {"database": str(self.path), "query": text, "max_rows": max_rows, "max_chars": max_chars}
        answer = await self.workers.ask({**request, "timeout_s": self.timeout_s})
        if "error" in answer:
            raise ToolError(answer["error"])
        return answer


def _cell(value: str) -> str:
    """Format a value on one line, its own bars escaped."""
    return value.replace("\\", "\\\\").replace("|", "\\|").replace("\r", "\\r").replace("\n", "\\n")
