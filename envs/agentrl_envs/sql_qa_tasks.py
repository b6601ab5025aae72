"""Small databases, each task its own, and questions in words with the query that answers them. A seed is a task.

What the tables and columns are called differs from task to task: it must be asked for.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from agentrl.environments.task_sampler import task_index
from agentrl_envs.splits import Split, assign_split
from agentrl_envs.sql_qa_families import FAMILIES, Rows

SYSTEM_PROMPT = "Query the database. Answer with \\boxed{}."


@dataclass(frozen=True)
class _SqlTask:
    question: str
    answer: str
    query: str  # that answers it
    script: str  # CREATE statements
    rows: Mapping[str, Sequence[tuple[int | str, ...]]]  # of each table
    family: str

    def write(self, path: Path) -> None:
        """Write the database as a file."""
        with closing(sqlite3.connect(path)) as db:
            self.fill(db)

    def fill(self, db: sqlite3.Connection) -> None:
        db.executescript(f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; {self.script}")
        for table, rows in self.rows.items():
            db.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)
        db.commit()


def draw(seed: int, *, split: Split, families: Sequence[str] | None = None) -> _SqlTask:
    """Draw task ``seed``. Raises ValueError for an unknown family."""
    names = list(FAMILIES) if families is None else list(families)
    if not names or any(name not in FAMILIES for name in names):
        raise ValueError(f"families are some of {', '.join(FAMILIES)}; not {names}")
    rng = random.Random(f"sql-qa/{task_index(seed)}/{split}/{','.join(names)}")
    while True:
        if (task := _attempt(rng, rng.choice(names), split)) is not None:
            return task


def _attempt(rng: random.Random, name: str, split: Split) -> _SqlTask | None:
    """Try to draw a task; None if it is of the other split, or its answer is none, or not the only one."""
    family = FAMILIES[name]
    called = {word: rng.choice(others) for word, others in family.words.items()}
    rows = family.rows(rng)
    values = family.values(rng, rows)
    ask, query = rng.choice(family.questions)
    question, query = ask.format(**values), _spelled(query.format(**values), called)
    if assign_split(question) != split:
        return None
    task = _SqlTask(question, "", query, _spelled(family.script, called), _renamed(rows, called), name)
    with closing(sqlite3.connect(":memory:")) as db:
        task.fill(db)
        found = db.execute(query).fetchmany(2)
    if len(found) != 1 or found[0][0] is None or found[0][0] == 0:
        return None
    return _SqlTask(question, str(found[0][0]), task.query, task.script, task.rows, name)


def _spelled(text: str, called: Mapping[str, str]) -> str:
    """Replace each ``$word`` by this database's name for it."""
    return re.sub(r"\$(\w+)", lambda m: called[m[1]], text)


def _renamed(rows: Rows, called: Mapping[str, str]) -> Mapping[str, Sequence[tuple[int | str, ...]]]:
    return {called[table]: ours for table, ours in rows.items()}
