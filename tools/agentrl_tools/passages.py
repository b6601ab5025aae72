"""The passages of a corpus, read from text files, JSON lines and Parquet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agentrl import UserError
from agentrl.errors import suggest
from agentrl.settings.documents import MAX_BYTES, parse_json

JSON_LINES = (".jsonl", ".ndjson", ".json")


class Passage(NamedTuple):
    id: str  # "": it is given its number
    title: str
    text: str


class Columns(NamedTuple):
    """The names of the columns of JSON lines and Parquet. Rows may lack an id and a title, never a text."""

    id: str = "id"
    title: str = "title"
    text: str = "text"


def read_passages(files: Iterable[Path], columns: Columns = Columns()) -> Iterator[Passage]:  # noqa: B008 - it is a tuple
    """Yield the passages of all files, one after the other, never all in memory.

    Raises:
        UserError: a file is not there, or a line or row is no passage; the sentence names it.
    """
    for file in files:
        if not file.is_file():
            what = "is a folder; name its files" if file.is_dir() else "is not there"
            raise UserError(f"{str(file)!r} {what} (from {Path.cwd()})")
        if file.suffix in JSON_LINES:
            yield from _json_lines(file, columns)
        elif file.suffix == ".parquet":
            yield from _parquet(file, columns)
        else:
            yield from _paragraphs(file)


def _paragraphs(file: Path) -> Iterator[Passage]:
    """Yield a passage a paragraph, with the file's name, without the suffix, as its title."""
    lines: list[str] = []
    try:
        with file.open(encoding="utf-8") as opened:
            for line in opened:
                if line.strip():
                    lines.append(line.strip())
                elif lines:
                    yield Passage("", file.stem, " ".join(lines))
                    lines = []
    except UnicodeDecodeError as error:
        raise UserError(f"{str(file)!r} is no text in UTF-8: {error.reason} at byte {error.start}") from None
    if lines:
        yield Passage("", file.stem, " ".join(lines))


def _json_lines(file: Path, columns: Columns) -> Iterator[Passage]:
    with file.open("rb") as opened:
        for number, line in enumerate(iter(lambda: opened.readline(MAX_BYTES), b""), 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            if len(line) == MAX_BYTES:
                raise UserError(f"{where}: it is longer than {MAX_BYTES >> 20} MiB")
            try:
                row = parse_json(line)
            except ValueError as error:
                raise UserError(f"{where}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise UserError(f"{where}: a row must be a JSON object, not {row!r:.60}")
            yield _passage(row, columns, where)


def _parquet(file: Path, columns: Columns) -> Iterator[Passage]:
    from agentrl.runtime.parquet_file import ParquetError, ParquetFile

    opened, number = ParquetFile(file), 0
    try:
        batches = opened.iter_batches([*columns])
        if columns.text not in opened.schema.names:
            raise _no_text(columns.text, opened.schema.names, str(file))
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield _passage(row, columns, f"{file}, row {number}")
    except (ParquetError, OSError) as error:
        raise UserError(f"{file} is no Parquet file that can be read: {error}") from None
    except (ValueError, OverflowError) as error:
        raise UserError(f"{file}, after row {number}: a value cannot be read: {error}") from None


def _passage(row: Mapping[str, Any], columns: Columns, where: str) -> Passage:
    if columns.text not in row:
        raise _no_text(columns.text, row, where)
    text = row[columns.text]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: {columns.text!r} must be a text that is not empty, not {text!r:.60}")
    given = (row.get(columns.id), row.get(columns.title))
    for name, value in zip((columns.id, columns.title), given, strict=True):
        if not isinstance(value, str | int | None) or isinstance(value, bool):
            raise UserError(f"{where}: {name!r} must be a text or a whole number, not {value!r:.60}")
    id_, title = ("" if value is None else _whole(str(value)) for value in given)
    return Passage(id_, title or id_, _whole(text))


def _whole(text: str) -> str:
    """Replace half characters, which JSON can spell and no file can hold."""
    return text.encode("utf-8", "replace").decode("utf-8").strip()


def _no_text(column: str, known: Iterable[str], where: str) -> UserError:
    return UserError(f"{where}: there is no {column!r}{suggest(column, known)} (--text_column NAME)")
