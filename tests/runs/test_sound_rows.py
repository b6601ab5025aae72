"""A bad row costs that row, and says why; a column of another type costs the file."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from agentrl.runs.sound_rows import select_sound_rows
from agentrl.runs.writer import SCHEMA

SEGMENTS: list[dict[str, Any]] = [
    {"author": "env", "token_ids": [1, 2], "logprobs": None, "versions": None},
    {"author": "model", "token_ids": [3, 4], "logprobs": [-0.5, float("-inf")], "versions": [0, 0]},
]
ROW: dict[str, Any] = {
    **{"step": 1, "split": "train", "task": 3, "sample": 0, "reward": 1.0, "credit": "trained", "stop": "terminated"},
    **{"rewards": [{"name": "right", "value": 1.0}], "segments": SEGMENTS, "messages": "[]", "info": None},
    "calls": [{"turn": 0, "name": "add", "status": "ok", "seconds": 0.1}],
}


def batch(*changes: dict[str, Any]) -> pa.RecordBatch:
    fields = [field for field in SCHEMA if field.name in ROW]
    return pa.RecordBatch.from_pylist([ROW | change for change in changes], schema=pa.schema(fields))


def test_sound_rows_are_all_kept_with_their_numbers() -> None:
    found = select_sound_rows(batch({}, {"reward": None}, {"segments": [], "calls": []}), 10)
    assert (list(found.numbers), found.left_out) == ([10, 11, 12], {})
    assert found.table.column("task").to_pylist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"step": None}, "it has no step"),
        ({"task": -1}, "its task is below 0"),
        ({"reward": float("nan")}, "its reward is no finite number"),
        ({"rewards": [{"name": "right", "value": float("inf")}]}, "its rewards.value is no finite number"),
        ({"stop": "<b>"}, "its stop is none that there is"),
        ({"segments": [{**SEGMENTS[0], "author": "me"}]}, "its segments.author is none that there is"),
        ({"segments": [{**SEGMENTS[0], "token_ids": [-1]}]}, "its segments.token_ids is below 0"),
        ({"segments": [{**SEGMENTS[1], "versions": [0]}]}, "its tokens and their logprobs are not alike many"),
        ({"segments": [{**SEGMENTS[1], "logprobs": None}]}, "its tokens and their logprobs are not alike many"),
        ({"segments": [{**SEGMENTS[0], "logprobs": [0.0, 0.0]}]}, "its tokens and their logprobs are not alike many"),
        ({"segments": [None]}, "it has an empty segments"),
    ],
    ids=str,
)
def test_a_bad_row_costs_that_row(change: dict[str, Any], why: str) -> None:
    found = select_sound_rows(batch({}, change, {"sample": 1}), 100)
    assert list(found.numbers) == [100, 102]
    assert found.table.column("sample").to_pylist() == [0, 1]
    assert found.left_out == {101: why}


def test_a_text_that_is_no_utf8_costs_its_row() -> None:
    sound = batch({}, {})
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"[]\xff\xfe")]
    )
    at = sound.schema.get_field_index("messages")
    columns = [broken if i == at else column for i, column in enumerate(sound.columns)]
    found = select_sound_rows(pa.RecordBatch.from_arrays(columns, sound.schema.names), 0)
    assert found.left_out == {1: "its messages is no text in UTF-8"}
    assert found.table.column("messages").to_pylist() == ["[]"]


def test_columns_are_converted_where_that_loses_nothing() -> None:
    rows = pa.RecordBatch.from_pylist([{"step": 1, "task": 2, "segments": [], "of others": "x"}])
    found = select_sound_rows(rows.set_column(0, "step", pa.array([1], pa.int8())), 0)
    assert found.table.schema.field("step").type == pa.int32()
    assert found.table.schema.names == ["step", "task", "segments"]


@pytest.mark.parametrize(
    ("name", "value"), [("step", "x"), ("segments", 7), ("segments", [7]), ("task", [1]), ("info", {})]
)
def test_a_column_of_another_type_costs_the_file(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"column '{name}' is .*, not "):
        select_sound_rows(pa.RecordBatch.from_pylist([{name: value if value != {} else {"a": 1}}]), 0)
