"""A database file as the model sees it: queries and their results as text, and the tables there are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import ToolError, WorldFault
from agentrl_tools.sql_workers import Workers

LONGEST_QUERY = 10_000  # characters
MOST_TABLES, LONGEST_TABLE = 200, 4000
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
    workers: Workers
    max_rows: int = 50
    max_chars: int = 300
    timeout_s: float = 5.0

    async def query(self, text: str) -> str:
        """The result: a line of the columns' names, then a line a row, ``|`` between the values.

        Raises:
            ToolError: what the database says of the query, or that it took too long.
            WorldFault: the database is gone.
        """
        if not text.strip() or len(text) > LONGEST_QUERY:
            raise ToolError(f"a query has 1 to {LONGEST_QUERY:,} characters, not {len(text):,}")
        answer = await self._ask(text, self.max_rows, self.max_chars)
        lines = ["|".join(_cell(value) for value in row) for row in (answer["columns"], *answer["rows"])]
        if not answer["rows"]:
            lines.append("(no rows)")
        if answer["more"]:
            lines.append(f"(there are more rows; these are the first {self.max_rows})")
        return "\n".join(lines)

    async def schema(self) -> str:
        """The CREATE statements, one a line. Raises as ``query``."""
        answer = await self._ask(_SCHEMA[self.path.suffix in DUCKDB], MOST_TABLES, LONGEST_TABLE)
        return "\n".join(" ".join(sql.split()) for (sql,) in answer["rows"]) or "(no tables)"

    async def _ask(self, text: str, max_rows: int, max_chars: int) -> dict[str, Any]:
        if not self.path.is_file():
            raise WorldFault("no_database", f"the database {str(self.path)!r} is gone")
        request = {"database": str(self.path), "query": text, "max_rows": max_rows, "max_chars": max_chars}
        answer = await self.workers.ask({**request, "timeout_s": self.timeout_s})
        if "error" in answer:
            raise ToolError(answer["error"])
        return answer


def _cell(value: str) -> str:
    """On one line, its own bars told from those between values."""
    return value.replace("\\", "\\\\").replace("|", "\\|").replace("\r", "\\r").replace("\n", "\\n")
