"""Parquet files that somebody else wrote, unpacked batch by batch in a process with little memory and time.

A file of some kilobytes can say that it holds billions of rows, or be the death of the library that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from agentrl.runtime.bounded_worker import AnswerError, BeyondBounds, BoundedWorkers

_MEMORY = 384 << 20  # bytes of a worker, beyond what pyarrow takes by itself
_CPU_S = 6  # for a batch
_VALUE_BYTES, _ROW_BYTES = 48, 232  # of a value, and of a row, as objects of Python's

_workers = BoundedWorkers(
    Path(__file__).with_name("parquet_answer.py"), "iter_pieces", memory_bytes=_MEMORY, cpu_s=_CPU_S
)


class ParquetError(Exception):
    """A Parquet file that cannot be read, or takes too much memory or time."""


@dataclass(frozen=True)
class ParquetFile:
    """A Parquet file, by its path.

    Args:
        path: of a file; what is no regular file is refused as it is read.
    """

    path: Path

    @property
    def schema(self) -> pa.Schema:
        """Return the names and types of its columns. Raises ParquetError and OSError, where nothing was read yet."""
        return self._head.remove_metadata()

    @property
    def metadata(self) -> dict[str, str]:
        """Return what agentrl wrote beside the schema, and ``rows``, the number of rows it says it has."""
        return {name.decode(): value.decode("utf-8", "replace") for name, value in self._head.metadata.items()}

    @cached_property
    def _head(self) -> pa.Schema:
        return _read_head(self._ask([], 0, 0))

    def iter_batches(
        self, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Open the file; return an iterator of its rows, in batches of some megabytes.

        Args:
            columns: those that are not there are left out; all by default.
            start, stop: the first row, and the one after the last.

        Raises:
            ParquetError: it cannot be read. The iterator raises it too.
            OSError: there is no such file.
        """
        pieces = self._ask(columns, start, stop)
        self.__dict__["_head"] = _read_head(pieces)
        return (batch for piece in pieces for batch in pa.ipc.open_stream(pa.py_buffer(piece)))

    def _ask(self, columns: Sequence[str] | None, start: int, stop: int | None) -> Iterator[bytes]:
        if not self.path.is_file():
            self.path.stat()
            raise ParquetError("it is no regular file")
        question = {"path": str(self.path.absolute()), "columns": columns, "start": start, "stop": stop}
        try:
            yield from _workers.ask(question)
        except BeyondBounds as error:
            raise ParquetError(str(error)) from None
        except AnswerError as error:
            raise ParquetError((str(error).splitlines() or [error.kind])[0].rstrip(".")) from None


def _read_head(pieces: Iterator[bytes]) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(next(pieces)))


@dataclass
class MemoryBudget:
    """A limit on what is kept of a file in memory: many times its own size, so that only a bomb is over it.

    Args:
        path: of the file.
        least: bytes that are allowed for any file.
        ratio: bytes that are allowed for each of its own.
    """

    path: Path
    least: int = 256 << 20
    ratio: int = 60
    spent: int = 0

    def add(self, batch: pa.RecordBatch, *, as_objects: bool = False) -> None:
        """Count a batch that is kept; ``as_objects``: of Python's. Raises ParquetError: that is too much."""
        self.spent += batch.nbytes
        if as_objects:
            self.spent += _VALUE_BYTES * sum(map(_count_values, batch.columns)) + _ROW_BYTES * batch.num_rows
        most = max(self.least, self.ratio * self.path.stat().st_size)
        if self.spent > most:
            raise ParquetError(f"it unpacks to more than {most >> 20:,} MiB, out of {self.path.stat().st_size:,} bytes")


def _count_values(array: Any) -> int:
    kind = array.type
    if pa.types.is_struct(kind):
        return len(array) + sum(_count_values(array.field(i)) for i in range(kind.num_fields))
    if pa.types.is_nested(kind):
        return len(array) + _count_values(array.flatten())
    return len(array)
