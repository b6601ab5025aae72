"""Rows of a dataset: JSONL, Parquet, a Hugging Face dataset, or any sequence of dicts; all at once, or as a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from agentrl import ContractError, UserError
from agentrl.errors import suggest
from agentrl.settings.documents import MAX_BYTES, check_depth, parse_json

Row = dict[str, Any]
Reader = Callable[[], Iterator[Row]]  # begins anew at each call
_JSON = (".jsonl", ".json", ".ndjson")
_PIECE = 1 << 20  # characters of a list that are read at once


@dataclass(frozen=True)
class DataSource:
    """The place that rows come from.

    Args:
        data: a path, a Hugging Face dataset (``name`` or ``name:config``), a dict of splits, or the rows themselves;
            for a stream also an ``IterableDataset``, or a function that returns an iterator.
        split: of a Hugging Face dataset or a dict of splits, as ``datasets`` writes it: ``train``, ``test[:500]``.
        revision: of a Hugging Face dataset: a branch, a tag or a commit.
        data_files: its files, by name or pattern, as ``datasets.load_dataset`` takes them.
        name: how a sentence calls the setting.
    """

    data: Any
    split: str | None = None
    revision: str | None = None
    data_files: Any = None
    name: str = "env.data"

    def load(self, split: str = "train") -> Sequence[Row]:
        """Load all rows.

        Args:
            split: where the source names none.

        Raises:
            UserError: there is no such file, dataset or split, or a line is no JSON object.
        """
        data = self._select(split)
        if not isinstance(data, str | Path):
            return self._sequence(data)
        path = Path(data)
        if path.suffix in _JSON:
            return list(_read_json(path))
        if path.suffix == ".parquet":
            return list(_read_parquet(path))
        rows: Sequence[Row] = self._hub(str(data), split, streaming=False)
        return rows

    def stream(self, split: str = "train") -> Reader:
        """Return a function that begins to read the rows, one after the other.

        Raises:
            UserError: as `load`, or the rows lie in memory, or could be read once only.
        """
        data = self._select(split)
        if callable(data):
            return lambda: iter(data())
        if not isinstance(data, str | Path):
            return self._iterable(data)
        path = Path(data)
        if path.suffix in (*_JSON, ".parquet"):
            read = partial(_read_parquet, is_stream=True) if path.suffix == ".parquet" else _read_json
            return lambda: read(_existing(path))
        reader: Reader = self._hub(str(data), split, streaming=True).__iter__
        return reader

    def is_stream(self) -> bool:
        """Return True for an object that can be read in order and has no length."""
        data = self._select("train")
        return callable(data) or (not isinstance(data, str | Path) and not hasattr(data, "__len__"))

    def _select(self, split: str) -> Any:
        """Return the data, or the named split of a dict of splits. Refuses what only a dataset of the hub heeds."""
        data, split = self.data, self.split or split
        if isinstance(data, Mapping):
            if split not in data:
                raise UserError(f"{self.name} has no split {split!r}{suggest(split, data)}")
            data = data[split]
        is_hub = isinstance(data, str) and Path(data).suffix not in (*_JSON, ".parquet")
        if not is_hub and (unread := "revision" if self.revision else "data_files" if self.data_files else None):
            raise ContractError(f"env.{unread} is for a dataset of the hub; {self.name} is {data!r:.80}")
        if not is_hub and self.split is not None and not isinstance(self.data, Mapping):
            raise ContractError(f"env.split is for a dataset that has splits; {self.name} is {data!r:.80}")
        return data

    def _hub(self, name: str, split: str, *, streaming: bool) -> Any:
        try:
            import datasets
        except ImportError:
            raise UserError(
                f"no dataset {name!r}: not a .jsonl or .parquet file; for Hugging Face datasets: pip install datasets"
            ) from None
        path, _, config = name.partition(":")
        split = self.split or split
        more = {"data_files": self.data_files} if self.data_files is not None else {}
        try:
            return datasets.load_dataset(
                path, config or None, split=split, revision=self.revision, streaming=streaming, **more
            )
        except Exception as error:  # the hub's many kinds: not found, offline, gated, no such split
            at = f", revision {self.revision!r}" if self.revision else ""
            raise UserError(
                f"cannot load dataset {name!r}, split {split!r}{at}: {type(error).__name__}: {error}"
            ) from error

    def _sequence(self, data: Any) -> Sequence[Row]:
        if hasattr(data, "to_dict") and hasattr(data, "iloc"):  # a DataFrame
            data = data.to_dict("records")
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise ContractError(self._describe_wrong(data))
        rows: Sequence[Row] = data
        return rows

    def _describe_wrong(self, data: object) -> str:
        return f"{self.name} must be a path, a dataset's name, or a sequence of rows; not {data!r:.80}"

    def _iterable(self, data: Any) -> Reader:
        if hasattr(data, "__len__"):
            raise ContractError(
                f"env.streaming is for files, datasets of the hub and IterableDatasets; {self.name} lies in memory: "
                "leave it out"
            )
        if not hasattr(data, "__iter__"):
            raise ContractError(self._describe_wrong(data))
        if iter(data) is data:
            raise ContractError(
                f"{self.name} is {data!r:.80}, which can be read only once; give the function that makes it, or an "
                "IterableDataset"
            )
        reader: Reader = data.__iter__
        return reader


def load_rows(data: Any, split: str = "train") -> Sequence[Row]:
    """Load the rows of ``data``, as `DataSource.load`."""
    return DataSource(data).load(split)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"no dataset {str(path)!r}: there is no such file (from {Path.cwd()})")
    return path


def _read_json(path: Path) -> Iterator[Row]:
    """Yield the objects of a file: one a line, or a list of them."""
    with _existing(path).open("rb") as file:
        first = next((line for line in iter(lambda: file.readline(MAX_BYTES), b"") if line.strip()), b"").lstrip()
        file.seek(0)
        if path.suffix == ".json" and first.startswith(b"["):
            with path.open(encoding="utf-8") as text:
                yield from _read_list(path, text)
            return
        number = 0
        while line := file.readline(MAX_BYTES):
            number += 1
            if len(line) == MAX_BYTES:
                raise UserError(f"{path}, line {number}: it is longer than {MAX_BYTES >> 20} MiB")
            if line.strip():
                yield _parse_row(line, f"{path}, line {number}")


def _read_list(path: Path, text: TextIO) -> Iterator[Row]:
    """Yield the objects of a list, of which no more than one is in memory."""
    decoder, number = json.JSONDecoder(), 0
    ahead = text.read(_PIECE).lstrip()[1:]
    while True:
        ahead = ahead.lstrip().removeprefix(",").lstrip() if number else ahead.lstrip()
        if ahead.startswith("]"):
            return
        try:
            row, end = decoder.raw_decode(ahead)
            if end == len(ahead):  # it may go on
                raise json.JSONDecodeError("it ends", ahead, end)
        except json.JSONDecodeError as error:
            more = text.read(max(_PIECE, len(ahead)))
            if not more or len(ahead) > MAX_BYTES:
                why = f"it is longer than {MAX_BYTES >> 20} MiB" if more else f"not JSON: {error}"
                raise UserError(f"{path}, item {number + 1}: {why}") from None
            ahead += more
            continue
        except (RecursionError, ValueError) as error:
            raise UserError(f"{path}, item {number + 1}: not JSON that can be read: {error}") from None
        number, ahead = number + 1, ahead[end:]
        yield _check_row(row, f"{path}, item {number}")


def _parse_row(line: bytes, where: str) -> Row:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}") from None
    return _check_row(row, where)


def _check_row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, not {json.dumps(row):.60}")
    try:
        check_depth(row)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    return row


def _read_parquet(path: Path, *, is_stream: bool = False) -> Iterator[Row]:
    from agentrl.runtime.parquet_file import MemoryBudget, ParquetError, ParquetFile

    budget = MemoryBudget(_existing(path))
    try:
        for batch in ParquetFile(path).iter_batches():
            if not is_stream:
                budget.add(batch, as_objects=True)
            yield from batch.to_pylist()
    except (ParquetError, OSError) as error:
        raise UserError(f"{path} is no Parquet file that can be read: {error}") from None
    except (ValueError, OverflowError) as error:  # a date that Python has not, text that is no UTF-8
        raise UserError(f"{path} holds a value that cannot be read: {error}") from None
