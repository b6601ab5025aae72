"""The tool sql: it reads, it ends, and nothing that a model may write changes anything or is left behind."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
import duckdb
import pytest
from agentrl_tools.sql import Sql

from agentrl import ContractError, EnvSpec, InfraError, ToolEnv, ToolError, UserError
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Observation

SCRIPT = "CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT); INSERT INTO t VALUES (1, 'a'), (2, 'b|c' || chr(10));"
LONG = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "
READ_ONLY = "the database can only be read"

Ask = Callable[..., Any]


def made(folder: Path, kind: str) -> Path:
    path = folder / f"a.{kind}"
    if kind == "duckdb":
        with duckdb.connect(str(path)) as db:
            db.execute(SCRIPT)
    else:
        with closing(sqlite3.connect(path)) as db:
            db.executescript(SCRIPT.replace("chr(", "char("))
    return path


@asynccontextmanager
async def opened(path: Path, **settings: Any) -> AsyncIterator[Ask]:
    pattern = Sql(path, **{"timeout_s": 0.5, "workers": 1, **settings})
    async with pattern.open() as database:
        toolset = pattern.start_episode(database)
        tools = {t.name: t for t in toolset.tool_list}
        yield lambda query=None: tools["sql"](query=query) if query is not None else tools["schema"]()
        await toolset.close()


@pytest.mark.parametrize("kind", ["db", "duckdb"])
async def test_results_are_lines_with_bars(tmp_path: Path, kind: str) -> None:
    async with opened(made(tmp_path, kind)) as ask:
        assert await ask("SELECT * FROM t ORDER BY id") == "id|name\n1|a\n2|b\\|c\\n"
        assert await ask("SELECT NULL AS n, 1.5 AS x FROM t WHERE id = 1") == "n|x\nNULL|1.5"
        assert await ask("SELECT id FROM t WHERE id > 5") == "id\n(no rows)"
        assert (await ask()).startswith("CREATE TABLE t")
        assert "t" in await ask("SELECT name FROM sqlite_master")


@pytest.mark.parametrize("kind", ["db", "duckdb"])
async def test_rows_and_values_are_cut_and_say_so(tmp_path: Path, kind: str) -> None:
    async with opened(made(tmp_path, kind), max_rows=2, max_chars=5) as ask:
        assert await ask(LONG + "SELECT x FROM c") == "x\n1\n2\n(there are more rows; these are the first 2)"
        assert await ask("SELECT 'abcdefgh' AS v") == "v\nabcde... (8 characters)"
        assert (await ask("SELECT CAST('abcdefgh' AS BLOB) AS v")).endswith("x'6162636465'... (8 bytes)")


ATTACKS = [
    "INSERT INTO t VALUES (9, 'x')",
    "UPDATE t SET name = 'x'",
    "DELETE FROM t",
    "DROP TABLE t",
    "CREATE TABLE u (x INTEGER)",
    "CREATE TEMP TABLE u (x INTEGER)",
    "CREATE VIEW u AS SELECT 1",
    "ATTACH ':memory:' AS x",
    "ATTACH '{folder}/new.db' AS x",
    "SELECT 1; SELECT 2",
    "SELECT 1; DROP TABLE t",
    "BEGIN",
    "PRAGMA query_only = OFF",
    "PRAGMA journal_mode = DELETE",
    "PRAGMA writable_schema = 1",
    "VACUUM INTO '{folder}/new.db'",
    "SELECT load_extension('{folder}/x.so')",
    "SELECT writefile('{folder}/new.db', 'x')",
    "SELECT readfile('{folder}/secret.csv')",
    "COPY t TO '{folder}/new.db'",
    "EXPORT DATABASE '{folder}/new.db'",
    "SELECT * FROM read_csv('{folder}/secret.csv')",
    "SELECT * FROM read_text('{folder}/secret.csv')",
    "SELECT * FROM '{folder}/secret.csv'",
    "SELECT * FROM glob('{folder}/*')",
    "SELECT * FROM sniff_csv('{folder}/secret.csv')",
    "FROM query('COPY t TO ''{folder}/new.db''')",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET enable_external_access = true",
    "SET memory_limit = '100GB'",
    "RESET lock_configuration",
    "PREPARE q AS SELECT 1",
    "CALL pragma_version()",
    "CHECKPOINT",
    "SELECT * FROM request",
    "SELECT",
    "SELECT " + "(" * 3000 + "1" + ")" * 3000,
    "SELECT '" + "x" * 20_000 + "'",
    "SELECT ?",
    "   ",
    "SELECT '\x00",
]


@pytest.mark.parametrize("kind", ["db", "duckdb"])
async def test_attacks_are_refused_in_words_and_change_nothing(tmp_path: Path, kind: str) -> None:
    path = made(tmp_path, kind)
    (tmp_path / "secret.csv").write_text("secret\n42\n")
    before = path.read_bytes()
    async with opened(path) as ask:
        for attack in ATTACKS:
            with pytest.raises(ToolError) as refusal:
                pytest.fail(f"{attack[:60]}: {await ask(attack.replace('{folder}', str(tmp_path)))}")
            assert str(refusal.value).strip()
            assert "secret\\n42" not in str(refusal.value)
        with pytest.raises(ToolError, match=READ_ONLY):
            await ask("DELETE FROM t")
        assert await ask("SELECT count(*) AS n FROM t") == "n\n2"
    assert path.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == [path.name, "secret.csv"]


ENDLESS = {
    "db": [
        LONG + "SELECT count(*) FROM c",
        LONG + "SELECT x, randomblob(9000000) AS b FROM c ORDER BY b",
        "SELECT printf('%.*c', 900000000, 'x')",  # one call, which nothing interrupts
        "SELECT instr(printf('%.*c', 9000000, 'a'), printf('%.*c', 4500000, 'a') || 'b')",
        "SELECT " + ",".join(["zeroblob(15999999)"] * 400),
    ],
    "duckdb": [
        LONG + "SELECT count(*) FROM c",
        "SELECT count(*) FROM range(100000000000) a, range(1000) b",
        "SELECT list(x) FROM range(1000000000) r(x)",
        "SELECT x FROM range(1000000000) r(x) ORDER BY random()",
    ],
}


@pytest.mark.parametrize(("kind", "endless"), [(kind, query) for kind, queries in ENDLESS.items() for query in queries])
async def test_what_would_not_end_is_ended_and_the_next_query_runs(tmp_path: Path, kind: str, endless: str) -> None:
    async with opened(made(tmp_path, kind)) as ask:
        with pytest.raises(ToolError, match=r"the query took over 0.5 s|too big|[Oo]ut of [Mm]emory|too much memory"):
            await ask(endless)
        assert await ask("SELECT count(*) AS n FROM t") == "n\n2"


async def test_a_large_value_is_refused_by_the_database(tmp_path: Path) -> None:
    async with opened(made(tmp_path, "db")) as ask:
        with pytest.raises(ToolError, match="string or blob too big"):
            await ask("SELECT zeroblob(1000000000)")


async def test_a_call_that_is_cancelled_leaves_no_query_behind(tmp_path: Path) -> None:
    async with opened(made(tmp_path, "db"), timeout_s=20) as ask:
        with anyio.move_on_after(0.5) as scope:
            await ask(LONG + "SELECT count(*) FROM c")
        assert scope.cancelled_caught
        assert await ask("SELECT count(*) AS n FROM t") == "n\n2"  # by the only place there is


async def test_a_worker_that_died_is_replaced(tmp_path: Path) -> None:
    pattern = Sql(made(tmp_path, "db"), workers=1)
    async with pattern.open() as database:
        [worker] = database.workers._idle
        worker.process.kill()
        with pytest.raises(ToolError, match="ended the process that ran it"):
            await database.query("SELECT 1")
        assert await database.query("SELECT 1 AS n") == "n\n1"


async def test_a_database_that_is_gone_is_the_worlds_fault(tmp_path: Path) -> None:
    path = made(tmp_path, "db")
    async with opened(path) as ask:
        path.unlink()
        with pytest.raises(InfraError, match="is gone"):
            await ask("SELECT 1")


class Asks(ToolEnv):
    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return self.ask("ask"), {}


async def test_many_episodes_ask_at_once(tmp_path: Path) -> None:
    path = made(tmp_path, "db")

    class Equipped(Asks):
        tools = (Sql(path, workers=2),)

    script = [
        call("schema") + call("sql", query="SELECT name FROM t WHERE id = 1"),
        call("sql", query="DROP TABLE t"),
    ]
    async with EnvSpec(Equipped).open() as spec:
        groups = await Rollout(spec, ScriptedEngine([*script, "done"]), ByteRenderer()).batch(range(6), 3)
    told = [[m["content"] for m in t.messages if m["role"] == "tool"] for g in groups for t in g]
    schema = "CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT)"
    assert told == [[schema, "name\na", f"error: not authorized: {READ_ONLY}"]] * 18


async def test_mistakes_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="max_rows, max_chars and workers are 1 or more, timeout_s is over 0"):
        Sql("a.db", timeout_s=0)
    with pytest.raises(UserError, match=r"no database .*: there is no such file"):
        async with opened(tmp_path / "gone.db"):
            pass
    (tmp_path / "text.db").write_text("no database, but long enough to be looked at " * 50)
    with pytest.raises(UserError, match=r"cannot read the database .*: file is not a database"):
        async with opened(tmp_path / "text.db"):
            pass


async def test_duckdb_is_asked_for_only_where_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [made(tmp_path, kind) for kind in ("db", "duckdb")]
    monkeypatch.setitem(sys.modules, "duckdb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    async with opened(paths[0]) as ask:
        assert await ask("SELECT 1 AS n") == "n\n1"
    with pytest.raises(UserError, match=r"needs the package duckdb: pip install 'agentrl-gym\[duckdb\]'"):
        async with opened(paths[1]):
            pass
