"""A corpus: passages in one SQLite file, found by BM25 (FTS5), built aside and put in place when it is whole."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from itertools import accumulate
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from agentrl import UserError
from agentrl_tools.passages import Passage

APPLICATION_ID = 0x41475243  # "AGRC": what tells a corpus from any other SQLite file
BATCH = 10_000
MOST_WORDS = 32  # of a query
MOST_MATCHES = 50_000  # passages to rank, at 2 us each and more
MOST_KNOWN = 100_000  # words whose frequency is kept
COMMON = {
    "a", "an", "and", "are", "as", "at", "be", "been", "by", "did", "do", "does", "for", "from", "had", "has", "have",
    "how", "in", "is", "it", "its", "of", "on", "or", "that", "the", "their", "there", "these", "this", "to", "was",
    "were", "what", "when", "where", "which", "who", "whom", "whose", "why", "will", "with",
}  # fmt: skip

_TABLES = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA cache_size = -65536;
CREATE TABLE passages (number INTEGER PRIMARY KEY, id TEXT NOT NULL, title TEXT NOT NULL, text TEXT NOT NULL);
CREATE VIRTUAL TABLE words USING fts5(
    title, text, content = 'passages', content_rowid = 'number', tokenize = 'porter unicode61 remove_diacritics 2'
);
"""
_INDEXES = """
CREATE UNIQUE INDEX by_id ON passages (id);
CREATE INDEX by_title ON passages (title COLLATE NOCASE);
INSERT INTO words(words) VALUES ('rebuild');
INSERT INTO words(words) VALUES ('optimize');
"""
_FIND = """
SELECT passages.id, passages.title, passages.text, snippet(words, 1, '', '', ' ... ', 40)
FROM words JOIN passages ON passages.number = words.rowid WHERE words MATCH ? ORDER BY rank LIMIT ?
"""


class Hit(NamedTuple):
    id: str
    title: str
    text: str
    snippet: str  # of the text, about the words that were found


def build_corpus(passages: Iterable[Passage], out: Path, report: Callable[[int], None] = lambda _: None) -> int:
    """Write a corpus to ``out``, which is there only when it is whole; return the number of its passages.

    Args:
        report: called with the number of passages so far, now and then.

    Raises:
        UserError: no passages, two of the same id, or ``out`` cannot be written.
    """
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        aside.unlink(missing_ok=True)
        with closing(sqlite3.connect(aside)) as db:
            db.executescript(_TABLES)
            count = _fill(db, passages, report)
            if count == 0:
                raise UserError("there are no passages: the files are empty")
            try:
                db.executescript(_INDEXES)
            except sqlite3.IntegrityError:
                raise UserError(f"two passages have the id {_find_duplicate(db)!r}; ids must differ") from None
        os.replace(aside, out)
    except (sqlite3.Error, OSError) as error:
        raise UserError(f"cannot write {str(out)!r}: {error}") from None
    finally:
        aside.unlink(missing_ok=True)
    return count


def _fill(db: sqlite3.Connection, passages: Iterable[Passage], report: Callable[[int], None]) -> int:
    count, rows = 0, []
    for count, (id_, title, text) in enumerate(passages, 1):
        rows.append((id_ or str(count), title or str(count), text))
        if len(rows) == BATCH:
            _insert(db, rows)
            report(count)
    _insert(db, rows)
    return count


def _insert(db: sqlite3.Connection, rows: list[tuple[str, str, str]]) -> None:
    db.executemany("INSERT INTO passages (id, title, text) VALUES (?, ?, ?)", rows)
    db.commit()
    rows.clear()


def _find_duplicate(db: sqlite3.Connection) -> str:
    row: tuple[str] = db.execute("SELECT id FROM passages GROUP BY id HAVING count(*) > 1 LIMIT 1").fetchone()
    return row[0]


class Corpus:
    """A corpus, opened to be read. Its methods block; threads may call them at once: each takes a connection."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises UserError if ``path`` is no corpus."""
        self.path = path
        self._idle: SimpleQueue[sqlite3.Connection] = SimpleQueue()
        self._matches: dict[str, int] = {}
        self._closed = False
        if not path.is_file():
            raise UserError(f"no corpus {str(path)!r} (from {Path.cwd()}); make one: agentrl index FILES --out {path}")
        try:
            marked = self._read("PRAGMA application_id")[0][0]
        except sqlite3.DatabaseError:
            marked = None
        if marked != APPLICATION_ID:
            self.close()
            raise UserError(f"{str(path)!r} is no corpus; make one: agentrl index FILES --out OTHER.db")

    def __len__(self) -> int:
        count: int = self._read("SELECT count(*) FROM passages")[0][0]
        return count

    def find(self, query: str, k: int) -> list[Hit]:
        """Find the ``k`` best passages by BM25 of those that hold any of the words.

        Common words count if there are no others; and of a word that very many passages hold, nothing is looked for
        beside rarer ones: it would take long, and weighs little.
        """
        chosen = self._choose_words(split_words(query))
        if not chosen:
            return []
        return [Hit(*row) for row in self._read(_FIND, " OR ".join(f'"{word}"' for word in chosen), k)]

    def _choose_words(self, words: list[str]) -> list[str]:
        """Return the rarest word, and the next ones while there are not too many passages to rank."""
        rarest = sorted(words, key=self._count_matches)
        totals = accumulate(self._count_matches(word) for word in rarest)
        return [
            word for n, (word, total) in enumerate(zip(rarest, totals, strict=True)) if n == 0 or total <= MOST_MATCHES
        ]

    def _count_matches(self, word: str) -> int:
        """Count the passages that hold a word, up to one over what may be ranked."""
        if (count := self._matches.get(word)) is None:
            if len(self._matches) >= MOST_KNOWN:
                self._matches.clear()
            counted = "SELECT count(*) FROM (SELECT 1 FROM words WHERE words MATCH ? LIMIT ?)"
            self._matches[word] = count = int(self._read(counted, f'"{word}"', MOST_MATCHES + 1)[0][0])
        return count

    def page(self, name: str) -> list[Passage]:
        """Return the passage of that id; or those of that title, upper or lower case, in their order; or none."""
        rows = self._read("SELECT id, title, text FROM passages WHERE id = ?", name)
        titled = "SELECT id, title, text FROM passages WHERE title = ? COLLATE NOCASE ORDER BY number"
        return [Passage(*row) for row in rows or self._read(titled, name)]

    def _read(self, query: str, *values: object) -> list[Any]:
        try:
            connection = self._idle.get_nowait()
        except Empty:
            where = f"{self.path.resolve().as_uri()}?mode=ro&immutable=1"
            connection = sqlite3.connect(where, uri=True, check_same_thread=False)
        try:
            return connection.execute(query, values).fetchall()
        finally:
            self._idle.put(connection)
            if self._closed:  # meanwhile
                self.close()

    def close(self) -> None:
        self._closed = True
        with suppress(Empty):
            while True:
                self._idle.get_nowait().close()


def split_words(query: str) -> list[str]:
    """Return the words to search for, each once. Letters and digits only: nothing in them is syntax to FTS5."""
    words = list(dict.fromkeys(re.findall(r"[^\W_]+", query.lower())))
    return [w for w in words if w not in COMMON][:MOST_WORDS] or words[:MOST_WORDS]
