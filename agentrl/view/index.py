"""The index of a run's episodes: a row each, without texts and tokens, to be searched, sorted and counted.

A table of pyarrow, the columns of ``SCHEMA``. Episodes stand in the order of their files, groups side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from agentrl.environments.task_sampler import HELD_OUT, task_index
from agentrl.runs.reader import read_columns
from agentrl.runs.writer import SCHEMA as STORED
from agentrl.runtime.parquet_file import MemoryBudget
from agentrl.types import TOOL_ERRORS

Column = NDArray[Any]  # of numbers
_CALLS = pa.list_(
    pa.struct([STORED.field("calls").type.value_type.field(n) for n in ("turn", "name", "status", "seconds")])
)
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("split", pa.string()),
        ("row", pa.int32()),  # in its file
        ("task", pa.int64()),  # its place in its split, from 0
        ("sample", pa.int32()),
        ("reward", pa.float64()),
        ("credit", pa.string()),  # trained, or why not; null where an older run does not tell
        ("advantage", pa.float64()),
        ("stop", pa.string()),
        ("fault", pa.string()),
        ("fault_message", pa.string()),
        ("calls", _CALLS),
        ("n_calls", pa.int32()),
        ("n_errors", pa.int32()),
        ("slowest", pa.float64()),  # seconds of the slowest call; null without calls
        ("seconds", pa.float64()),  # the whole episode; null where it was not measured
        ("turns", pa.int32()),  # null where an older run does not tell
        ("shared_turns", pa.int32()),  # that another branch counts; null where an older run does not tell
        ("opens", pa.bool_()),  # the first of its group
        ("question", pa.string()),  # in one line, cut; null where an older run does not tell
        ("answer", pa.string()),
        ("expected", pa.string()),
    ]
)
_READ = (
    *("step", "split", "task", "sample", "reward", "credit", "advantage", "advantages"),
    *("stop", "fault", "fault_message", "shared_turns"),
)
TEXTS = ("question", "answer", "expected")
_LEAST, _RATIO = 64 << 20, 10  # bytes of a file's index, at the most: any file's, and for each byte of it


class FileColumns(NamedTuple):
    """The columns of a file that the index needs, the rows' numbers, and why others are left out, by their numbers."""

    table: pa.Table
    rows: Column
    left_out: Mapping[int, str]


def read_index_columns(path: Path) -> FileColumns:
    """Read the columns of a file that the index needs; those that an older run lacks are null.

    Raises:
        UserError: it cannot be read.
    """
    names = [*_READ, *TEXTS, "calls", "timings"]
    calls = [f"calls.list.element.{field.name}" for field in _CALLS.value_type]
    sound = read_columns(
        path, [*(n for n in names if n != "calls"), *calls], MemoryBudget(path, least=_LEAST, ratio=_RATIO)
    )
    have, count = sound.table.schema.names, len(sound.numbers)
    columns = [sound.table[n] if n in have else pa.nulls(count, STORED.field(n).type) for n in names]
    return FileColumns(pa.table(columns, names=names), sound.numbers.astype(np.int32), sound.left_out)


def build_episode_index(raws: Sequence[FileColumns]) -> list[pa.Table]:
    """Build the index of each file, from its columns as ``read_index_columns`` returns them."""
    raw = pa.concat_tables([r.table for r in raws]).combine_chunks()
    opens_file = np.concatenate([np.arange(len(r.rows)) == 0 for r in raws])
    table = _derive(raw, np.concatenate([r.rows for r in raws]), opens_file)
    ends = np.cumsum([len(r.rows) for r in raws])
    return [table.slice(end - len(r.rows), len(r.rows)) for r, end in zip(raws, ends, strict=True)]


def _derive(raw: pa.Table, rows: Column, opens_file: Column) -> pa.Table:
    calls, count = as_array(raw["calls"]), raw.num_rows
    parents = pc.list_parent_indices(calls).to_numpy(zero_copy_only=False)
    failed = pc.is_in(pc.struct_field(calls.flatten(), "status"), pa.array(TOOL_ERRORS)).to_numpy(zero_copy_only=False)
    slowest = np.full(count, -1.0)
    np.maximum.at(slowest, parents, as_floats(pc.struct_field(calls.flatten(), "seconds")))
    derived = {
        "row": rows,
        "task": _count_from_0(as_array(raw["task"])),
        "n_calls": pc.fill_null(pc.list_value_length(calls), 0),
        "n_errors": np.bincount(parents[failed.astype(bool)], minlength=count),
        "slowest": pa.array(slowest, mask=slowest < 0),
        "seconds": _episode_seconds(as_array(raw["timings"]), count),
        "turns": pc.list_value_length(as_array(raw["advantages"])),
        "opens": _opens_group(opens_file, as_floats(raw["task"]), as_floats(raw["sample"])),
    }
    columns = [pa.array(derived[f.name]).cast(f.type) if f.name in derived else as_array(raw[f.name]) for f in SCHEMA]
    return pa.table(columns, schema=SCHEMA)


def _count_from_0(task: pa.Array) -> pa.Array:
    """Return each task's place in its split: a generator's held-out integers count from 0."""
    known = task.to_numpy(zero_copy_only=False)
    return pa.array([task_index(int(t)) for t in known] if len(known) and known.max() >= HELD_OUT else known)


def _episode_seconds(timings: pa.Array, count: int) -> pa.Array:
    flat = timings.flatten()
    whole = pc.equal(pc.struct_field(flat, "name"), "total").to_numpy(zero_copy_only=False).astype(bool)
    seconds = np.full(count, np.nan)
    seconds[pc.list_parent_indices(timings).to_numpy(zero_copy_only=False)[whole]] = as_floats(
        pc.struct_field(flat, "value")
    )[whole]
    return pa.array(seconds, mask=np.isnan(seconds))


def _opens_group(opens_file: Column, task: Column, member: Column) -> Column:
    """Return a mask of the rows that open a group: in a new file, of another task, or of a lower member."""
    opens = opens_file.copy()
    opens[1:] |= (task[1:] != task[:-1]) | (member[1:] <= member[:-1])
    return np.asarray(opens)


def as_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column in one piece."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole


def as_floats(column: pa.Array | pa.ChunkedArray) -> Column:
    """Return a column as floats; nan where it is null."""
    return np.asarray(pc.cast(as_array(column), pa.float64()).to_numpy(zero_copy_only=False))
