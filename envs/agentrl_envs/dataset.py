"""Rows of a dataset: JSONL, Parquet, a Hugging Face dataset, or any sequence of dicts; all at once, or as a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import ContractError, UserError
from agentrl.errors import suggest

Row = dict[str, Any]
Reader = Callable[[], Iterator[Row]]  # begins anew at each call
_JSON = (".jsonl", ".json", ".ndjson")


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
            read = _read_parquet if path.suffix == ".parquet" else _read_json
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
        first = next((line for line in file if line.strip()), b"").lstrip()
        file.seek(0)
        if path.suffix == ".json" and first.startswith(b"[") and not _is_json(first):
            yield from _read_list(path, file.read())
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parse_row(line, f"{path}, line {number}")


def _is_json(line: bytes) -> bool:
    try:
        return not isinstance(json.loads(line), list)
    except ValueError:
        return False


def _read_list(path: Path, text: bytes) -> Iterator[Row]:
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{path}, item {number}: a row must be a JSON object, not {row!r:.60}")
        yield row


def _parse_row(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: a row must be a JSON object, not {line.strip().decode():.60}")
    return row


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(_existing(path)) as file:
            for batch in file.iter_batches(1024):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is no Parquet file: {error}") from None
