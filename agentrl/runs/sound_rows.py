"""The rows of a file of episodes that are as the schema says, and the reason for each one that is not.

A bad row costs that row. A column of another type costs the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from agentrl.runs.writer import SCHEMA
from agentrl.types import Author, Stop, ThreadRole

Mask = NDArray[np.bool_]
_MAY_BE_NULL = {
    *("reward", "rewards.value", "credit", "advantage", "weight", "fault", "fault_message", "info", "temperature"),
    *("question", "answer", "expected", "shared_turns", "weights", "advantages", "step_rewards", "timings"),
    *("calls.start", "calls.end", "threads", "threads.parent", "threads.after"),
    *(f"segments.{name}" for name in ("logprobs", "versions", "learner_logprobs", "loss_gradients", "corrections")),
}
_MAY_BE_ANY_FLOAT = "segments."  # a run that diverged has such numbers too
_NAMED = {
    "stop": [s.value for s in Stop],
    "segments.author": list(get_args(Author)),
    "threads.role": [r.value for r in ThreadRole],
}
_FROM_ZERO = {
    *("step", "task", "sample", "shared_turns", "calls.turn", "calls.start", "calls.end", "segments.token_ids"),
    *("threads.parent", "threads.after", "threads.turns", "threads.shared"),
}


class SoundRows(NamedTuple):
    """Rows that are sound, their numbers in the file, and why others are not, by their numbers."""

    table: pa.RecordBatch | pa.Table
    numbers: NDArray[np.int64]
    left_out: Mapping[int, str]


def select_sound_rows(batch: pa.RecordBatch, first: int) -> SoundRows:
    """Select the rows that are sound; the columns have the types of the schema then.

    Args:
        first: the number of the batch's first row in the file.

    Raises:
        ValueError: a column has another type.
    """
    known = {f.name: f.type for f in SCHEMA}
    names = [name for name in batch.schema.names if name in known]
    columns = [_conform(batch.column(name), known[name], name) for name in names]
    why: dict[int, str] = {}
    for name, column in zip(names, columns, strict=True):
        for mask, reason in _find_faults(column, name):
            for row in np.flatnonzero(mask):
                why.setdefault(int(row), reason)
    if {"segments", "calls"} <= set(names):
        for row in np.flatnonzero(_find_unlike_lengths(columns[names.index("segments")])):
            why.setdefault(int(row), "its tokens and their logprobs are not alike many")
    keep = np.ones(batch.num_rows, dtype=bool)
    keep[list(why)] = False
    table = pa.RecordBatch.from_arrays(columns, names).filter(pa.array(keep))
    return SoundRows(table, np.flatnonzero(keep) + first, {first + row: why[row] for row in sorted(why)})


def _conform(array: pa.Array, kind: pa.DataType, name: str) -> pa.Array:
    """Convert a column to its type in the schema; of structs only the fields that are there."""
    try:
        if pa.types.is_null(array.type):
            return pa.nulls(len(array), kind)
        if pa.types.is_list(kind):
            array = pc.cast(array, pa.list_(array.type.value_type))
            inner = _conform(array.values, kind.value_type, name)
            return pa.ListArray.from_arrays(array.offsets, inner, mask=pc.is_null(array) if array.null_count else None)
        if pa.types.is_struct(kind):
            fields = [f for f in kind if array.type.get_field_index(f.name) >= 0]
            parts = [_conform(pc.struct_field(array, f.name), f.type, f"{name}.{f.name}") for f in fields]
            mask = pc.is_null(array) if array.null_count else None
            return pa.StructArray.from_arrays(parts, fields=[f.with_nullable(True) for f in fields], mask=mask)
        return array if array.type == kind else pc.cast(array, kind)
    except (pa.ArrowException, TypeError, AttributeError, NotImplementedError):
        raise ValueError(f"column {name!r} is {array.type!s:.60}, not {kind!s:.60}") from None


def _find_faults(array: pa.Array, name: str) -> Iterator[tuple[Mask, str]]:
    """Yield masks over a column's rows, each with what is wrong with the rows that it has."""
    is_null = _mask(pc.is_null(array))
    if name not in _MAY_BE_NULL:
        yield is_null, f"it has no {name}"
    kind = array.type
    if pa.types.is_list(kind):
        parents = pc.list_parent_indices(array).to_numpy(zero_copy_only=False)
        for mask, reason in _find_faults(array.flatten(), name):
            yield _lift(parents[mask], len(array)), reason.replace("it has no ", "it has an empty ", 1)
    elif pa.types.is_struct(kind):
        for i in range(kind.num_fields):
            own = f"{name}.{kind.field(i).name}"
            for mask, reason in _find_faults(pc.struct_field(array, i), own):
                yield mask & ~is_null, reason
    else:
        yield from _find_wrong_values(array, name, is_null)


def _find_wrong_values(array: pa.Array, name: str, is_null: Mask) -> Iterator[tuple[Mask, str]]:
    if pa.types.is_string(array.type):
        if (broken := _find_broken_texts(array)) is not None:
            yield broken, f"its {name} is no text in UTF-8"
        elif name in _NAMED:
            yield ~_mask(pc.is_in(array, pa.array(_NAMED[name]))) & ~is_null, f"its {name} is none that there is"
    elif pa.types.is_floating(array.type) and not name.startswith(_MAY_BE_ANY_FLOAT):
        yield ~_mask(pc.fill_null(pc.is_finite(array), True)), f"its {name} is no finite number"
    elif name in _FROM_ZERO:
        yield _mask(pc.fill_null(pc.less(array, 0), False)), f"its {name} is below 0"


def _find_broken_texts(array: pa.Array) -> Mask | None:
    """Return a mask of the texts that are no UTF-8; None where all are."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raw = array.cast(pa.binary(), safe=False).to_pylist()
        return np.array([text is not None and not _is_utf8(text) for text in raw], dtype=bool)
    return None


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _find_unlike_lengths(segments: pa.Array) -> Mask:
    """Return a mask of the rows with a segment whose numbers are not one a token, or that are not the model's."""
    flat = segments.flatten()
    names = [flat.type.field(i).name for i in range(flat.type.num_fields)]
    if not {"author", "token_ids", "logprobs", "versions"} <= set(names):
        return np.zeros(len(segments), dtype=bool)
    by_model = _mask(pc.fill_null(pc.equal(pc.struct_field(flat, "author"), "model"), False))
    length: Callable[[str], NDArray[np.int64]] = lambda name: (  # noqa: E731
        pc.fill_null(pc.list_value_length(pc.struct_field(flat, name)), -1).to_numpy(zero_copy_only=False)
    )
    tokens = length("token_ids")
    wrong = np.zeros(len(flat), dtype=bool)
    sampled = by_model & ((length("logprobs") >= 0) | (length("versions") >= 0))  # or demonstrated: with neither
    for name in ("logprobs", "versions"):
        wrong |= length(name) != np.where(sampled, tokens, -1)
    parents = pc.list_parent_indices(segments).to_numpy(zero_copy_only=False)
    return _lift(parents[wrong], len(segments))


def _lift(parents: NDArray[np.int64], count: int) -> Mask:
    mask = np.zeros(count, dtype=bool)
    mask[parents] = True
    return mask


def _mask(array: pa.Array) -> Mask:
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=bool)
