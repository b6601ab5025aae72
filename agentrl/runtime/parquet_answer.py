"""The answers of a bounded worker that reads Parquet: batches of rows as Arrow IPC streams.

A question has ``path``, ``columns`` (null: all; those that are not there are left out), ``start`` and ``stop``, numbers
of rows. The first piece of the answer is the schema, with the number of rows that the file claims as metadata. Each
other one is a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_BATCH_BYTES = 8 << 20  # aimed at, by what the file says of itself
_BATCH_VALUES = 1 << 19
_MOST_ROWS = 4096
_PIECE_BYTES = 64 << 20  # refused beyond
_PIECE_VALUES = 8 << 20
_DEPTH = 24  # lists and structs in each other
_COLUMNS = 2_000

_NESTED = (
    *(pa.types.is_struct, pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_map),
)
_PLAIN = (
    *(pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null, pa.types.is_decimal),
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary),
    *(pa.types.is_fixed_size_binary, pa.types.is_temporal),
)

pa.set_memory_pool(pa.system_memory_pool())  # others reserve address space, which is what is limited
pa.set_cpu_count(1)


def iter_pieces(question: dict[str, Any]) -> Iterator[bytes]:
    """Yield the pieces of an answer. Raises ValueError and pyarrow's exceptions."""
    with pq.ParquetFile(
        question["path"],
        buffer_size=1 << 20,
        pre_buffer=False,
        thrift_string_size_limit=32 << 20,
        thrift_container_size_limit=200_000,
    ) as file:
        schema, metadata = file.schema_arrow, file.metadata
        leaves = sum(map(_count_leaves, schema.types))
        if leaves > _COLUMNS:
            raise ValueError(f"it has {leaves:,} columns, more than {_COLUMNS:,}")
        kept = {n: v for n, v in (schema.metadata or {}).items() if n.startswith(b"agentrl")}
        kept[b"rows"] = str(metadata.num_rows).encode()
        yield pa.schema([pa.field(f.name, f.type) for f in schema], metadata=kept).serialize().to_pybytes()
        names = question["columns"]
        names = None if names is None else [n for n in names if n.partition(".")[0] in schema.names]
        if names is None or names:
            yield from _read(file, names, question["start"], question["stop"], _choose_batch_size(metadata, leaves))


def _read(file: pq.ParquetFile, names: list[str] | None, start: int, stop: int | None, size: int) -> Iterator[bytes]:
    at = 0
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if stop is not None and at >= stop:
            return
        if rows >= 0 and at + rows <= start:  # what it says of itself may be wrong: then the rows have other numbers
            at += rows
            continue
        for batch in file.iter_batches(size, row_groups=[group], columns=names, use_threads=False):
            first, last = max(start - at, 0), batch.num_rows if stop is None else min(batch.num_rows, stop - at)
            at += batch.num_rows
            if first < last:
                yield _pack(batch.slice(first, last - first))
            if stop is not None and at >= stop:
                return


def _choose_batch_size(metadata: pq.FileMetaData, leaves: int) -> int:
    total = sum(max(metadata.row_group(g).total_byte_size, 0) for g in range(metadata.num_row_groups))
    row = total // max(metadata.num_rows, 1) + 1
    return int(max(1, min(_MOST_ROWS, _BATCH_BYTES // row, _BATCH_VALUES // max(leaves, 1))))


def _count_leaves(kind: pa.DataType, depth: int = 1) -> int:
    """Count the columns that a type is stored as. Raises ValueError: it is nested too deeply, or none that is read."""
    if depth > _DEPTH:
        raise ValueError(f"a column is nested more than {_DEPTH} deep")
    if isinstance(kind, pa.BaseExtensionType):
        return _count_leaves(kind.storage_type, depth + 1)
    if pa.types.is_dictionary(kind) and depth == 1:
        return _count_leaves(kind.value_type, depth + 1)
    if any(is_such(kind) for is_such in _NESTED):
        inner: int = sum(_count_leaves(kind.field(i).type, depth + 1) for i in range(kind.num_fields))
        return max(inner, 1)
    if not any(is_such(kind) for is_such in _PLAIN):
        raise ValueError(f"a column is of the type {kind!s:.80}, which is not read here")
    return 1


def _unpack(array: pa.Array) -> pa.Array:
    """Return a column without a dictionary, which a short file can name a million times, and without its extension."""
    if isinstance(array.type, pa.BaseExtensionType):
        return array.storage
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _pack(batch: pa.RecordBatch) -> bytes:
    """Serialize a batch. Raises ValueError: it is too large."""
    batch = pa.RecordBatch.from_arrays(list(map(_unpack, batch.columns)), batch.schema.names)
    values = sum(map(_count_values, batch.columns))
    if values > _PIECE_VALUES or batch.nbytes > _PIECE_BYTES:
        raise ValueError(f"a part of it unpacks to {values:,} values in {batch.nbytes >> 20:,} MiB, which is too much")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _count_values(array: Any) -> int:
    kind = array.type
    if pa.types.is_struct(kind):
        return len(array) + sum(_count_values(array.field(i)) for i in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return len(array) + _count_values(array.values)
    if pa.types.is_map(kind):
        return len(array) + _count_values(array.keys) + _count_values(array.items)
    return len(array)
