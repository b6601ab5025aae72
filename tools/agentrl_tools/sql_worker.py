"""Runs queries in a process that may be killed: a line of JSON in, a line of JSON out.

Started by its file's name, without the rest of agentrl. Every query has a connection of its own: nothing that one does
to it is there for the next.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sqlite3
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

MEMORY = 2 << 30  # bytes that the process may ask for; DuckDB asks for more than it uses
FILE = 256 << 20  # bytes of a temporary file
VALUE = 16_000_000  # bytes of a text or blob that SQLite makes
DUCKDB = {
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "python_enable_replacements": False,
    "memory_limit": "512MB",
    "temp_directory": "",  # a query that needs more memory than it has is refused
    "threads": 1,
    "lock_configuration": True,
}

Request = dict[str, Any]  # database, query, max_rows, max_chars, timeout_s
Answer = dict[str, Any]  # columns, rows, more; or error, and whether it was late
_PRAGMAS = ("table_info", "table_xinfo", "table_list", "index_list", "index_info", "foreign_key_list")
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
_FORBIDDEN = ("load_extension", "readfile", "writefile", "edit", "fts3_tokenizer")


class _RefusedError(Exception):
    """A refusal, in words for the model."""


class _QueryClock:
    """The time of a query, which begins when the database is open."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.end = seconds, math.inf

    def begin(self) -> None:
        self.end = time.monotonic() + self.seconds

    def over(self) -> bool:
        return time.monotonic() >= self.end


def _main() -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # where a process may not be limited so
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_answer(json.loads(line))) + "\n")
        sys.stdout.flush()


def _end_with(parent: int) -> None:
    """End this process when the one that started it has ended, also in the middle of a query."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _answer(request: Request) -> Answer:
    path = Path(request["database"])
    run = _duckdb if path.suffix in (".duckdb", ".ddb") else _sqlite
    clock = _QueryClock(request["timeout_s"])
    try:
        return run(path, request, clock)
    except Exception as error:  # whatever a query may bring about is the query's
        if clock.over():
            return {"error": "", "late": True}
        return {"error": "out of memory" if isinstance(error, MemoryError) else str(error) or type(error).__name__}


def _sqlite(path: Path, request: Request, clock: _QueryClock) -> Answer:
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=1.0)) as db:
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE)
        db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        db.execute("PRAGMA query_only = ON")
        db.execute("PRAGMA trusted_schema = OFF")
        db.set_authorizer(_authorize)
        db.set_progress_handler(clock.over, 10_000)
        clock.begin()
        db.text_factory = lambda raw: raw.decode("utf-8", "replace")
        try:
            cursor = db.execute(request["query"])
        except sqlite3.DatabaseError as error:
            if "not authorized" in str(error) or "authorization denied" in str(error):
                raise _RefusedError(f"{error}: the database can only be read") from None
            raise
        return _fetch_rows(cursor.description, cursor.fetchone, request)


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Allow reading, and nothing else that SQLite can do."""
    if action == sqlite3.SQLITE_FUNCTION:
        return sqlite3.SQLITE_DENY if second in _FORBIDDEN else sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_PRAGMA:
        return sqlite3.SQLITE_OK if first in _PRAGMAS else sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


_opened: dict[Path, Any] = {}


def _duckdb(path: Path, request: Request, clock: _QueryClock) -> Answer:
    """Run a query with a cursor of its own. The file stays open, as opening takes DuckDB long."""
    import duckdb

    if path not in _opened:
        _opened[path] = duckdb.connect(str(path), read_only=True, config=DUCKDB)
    with closing(_opened[path].cursor()) as db:
        statements = db.extract_statements(request["query"])
        if len(statements) != 1:
            raise _RefusedError(f"one statement at a time, not {len(statements)}")
        if statements[0].type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
            raise _RefusedError(f"not authorized: {statements[0].type.name}; the database can only be read")
        clock.begin()
        timer = threading.Timer(clock.seconds, db.interrupt)
        timer.start()
        try:
            db.execute(statements[0])
            return _fetch_rows(db.description, db.fetchone, request)
        finally:
            timer.cancel()


def _fetch_rows(
    description: Sequence[Any] | None, next_row: Callable[[], Iterable[Any] | None], request: Request
) -> Answer:
    """Fetch as many rows as are wanted, one by one: all together may be more than there is room for."""
    rows: list[list[str]] = []
    while (row := next_row()) is not None:
        if len(rows) == request["max_rows"]:
            return {"columns": _names(description), "rows": rows, "more": True}
        rows.append([_text(value, request["max_chars"]) for value in row])
    return {"columns": _names(description), "rows": rows, "more": False}


def _names(description: Sequence[Any] | None) -> list[str]:
    return [str(column[0]) for column in description or ()]


def _text(value: Any, most: int) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"x'{value[:most].hex()}'" if len(value) <= most else f"x'{value[:most].hex()}'... ({len(value)} bytes)"
    text = repr(value) if isinstance(value, float) else str(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    _main()
