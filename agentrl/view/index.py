"""The index of a run's episodes: a row each, without texts and tokens; what is searched, sorted and counted.

A table of pyarrow, the columns of ``SCHEMA``. Episodes stand in the order of their files, groups side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.run import SCHEMA as STORED
from agentrl.view.arrays import Column

_CALLS = STORED.field("calls").type
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("split", pa.string()),
        ("row", pa.int32()),  # in its file
        ("task", pa.int64()),
        ("member", pa.int32()),
        ("reward", pa.float64()),
        ("credit", pa.string()),  # trained, or why not; null where an older run does not tell
        ("advantage", pa.float64()),
        ("stop", pa.string()),
        ("fault", pa.string()),
        ("fault_message", pa.string()),
        ("calls", _CALLS),
        ("n_calls", pa.int32()),
        ("n_refused", pa.int32()),
        ("slowest", pa.float64()),  # seconds of the slowest call; null without calls
        ("seconds", pa.float64()),  # the whole episode; null where it was not measured
        ("turns", pa.int32()),  # null where an older run does not tell
        ("opens", pa.bool_()),  # the first of its group
        ("question", pa.string()),  # in one line, cut; null where an older run does not tell
        ("answer", pa.string()),
        ("expected", pa.string()),
    ]
)
READ = (
    *("step", "split", "task", "member", "reward", "credit", "advantage", "advantages"),
    *("stop", "fault", "fault_message"),
)
TEXTS = ("question", "answer", "expected")


def read_file(path: Path) -> Any:
    """A file's columns that the index is made of; columns that an older run lacks are null.

    Raises:
        OSError, pyarrow.ArrowException: it cannot be read.
    """
    wanted = [*READ, *TEXTS, "calls", "timings"]
    file = pq.ParquetFile(path)
    have = [name for name in wanted if name in file.schema_arrow.names]
    raw = file.read(columns=have, use_threads=False)
    columns = [
        raw[name].cast(STORED.field(name).type) if name in have else pa.nulls(raw.num_rows, STORED.field(name).type)
        for name in wanted
    ]
    return pa.table(columns, names=wanted)


def indexed(raws: Sequence[Any]) -> list[Any]:
    """An index of each file, of what ``read_file`` gave."""
    raw = pa.concat_tables(raws).combine_chunks()
    rows = np.concatenate([np.arange(r.num_rows, dtype=np.int32) for r in raws])
    table = _derive(raw, rows)
    ends = np.cumsum([r.num_rows for r in raws])
    return [table.slice(end - r.num_rows, r.num_rows) for r, end in zip(raws, ends, strict=True)]


def _derive(raw: Any, rows: Column) -> Any:
    calls, count = one(raw["calls"]), raw.num_rows
    parents = pc.list_parent_indices(calls).to_numpy(zero_copy_only=False)
    refused = pc.equal(pc.struct_field(calls.flatten(), "status"), "refused").to_numpy(zero_copy_only=False)
    slowest = np.full(count, -1.0)
    np.maximum.at(slowest, parents, numbers(pc.struct_field(calls.flatten(), "seconds")))
    made = {
        "row": rows,
        "n_calls": pc.fill_null(pc.list_value_length(calls), 0),
        "n_refused": np.bincount(parents[refused.astype(bool)], minlength=count),
        "slowest": pa.array(slowest, mask=slowest < 0),
        "seconds": _total(one(raw["timings"]), count),
        "turns": pc.list_value_length(one(raw["advantages"])),
        "opens": _opens(rows, numbers(raw["task"]), numbers(raw["member"])),
    }
    columns = [pa.array(made[f.name]).cast(f.type) if f.name in made else one(raw[f.name]) for f in SCHEMA]
    return pa.table(columns, schema=SCHEMA)


def _total(timings: Any, count: int) -> Any:
    flat = timings.flatten()
    whole = pc.equal(pc.struct_field(flat, "name"), "total").to_numpy(zero_copy_only=False).astype(bool)
    found = np.full(count, np.nan)
    found[pc.list_parent_indices(timings).to_numpy(zero_copy_only=False)[whole]] = numbers(
        pc.struct_field(flat, "value")
    )[whole]
    return pa.array(found, mask=np.isnan(found))


def _opens(rows: Column, task: Column, member: Column) -> Column:
    """Where a group begins: a new file, another task, or members that begin again."""
    opens = rows == 0
    opens[1:] |= (task[1:] != task[:-1]) | (member[1:] <= member[:-1])
    return np.asarray(opens)


def one(column: Any) -> Any:
    """A column in one piece."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole


def numbers(column: Any) -> Column:
    """A column as numbers; nan where it is null."""
    return np.asarray(pc.cast(one(column), pa.float64()).to_numpy(zero_copy_only=False))


def empty() -> Any:
    return SCHEMA.empty_table()
