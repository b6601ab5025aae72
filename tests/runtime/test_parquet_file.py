"""Parquet is read batch by batch; what was made to fill the memory is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.runtime.parquet_file import MemoryBudget, ParquetError, ParquetFile


def write(path: Path, **columns: Any) -> ParquetFile:
    pq.write_table(pa.table(columns), path)
    return ParquetFile(path)


def test_rows_come_as_they_were_written(tmp_path: Path) -> None:
    numbers, lists = list(range(10_000)), [[{"a": str(i)}] * (i % 3) for i in range(10_000)]
    file = write(tmp_path / "t.parquet", n=numbers, of=lists, d=pa.array(["x", "y"] * 5000).dictionary_encode())
    rows = [row for batch in file.iter_batches() for row in batch.to_pylist()]
    assert rows == [{"n": n, "of": of, "d": "xy"[n % 2]} for n, of in zip(numbers, lists, strict=True)]
    assert file.metadata["rows"] == "10000"
    assert file.schema.names == ["n", "of", "d"]


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (99, 101), (250, None), (299, 999), (300, 301)])
def test_some_rows_and_some_columns_are_read_alone(tmp_path: Path, start: int, stop: int | None) -> None:
    table = pa.table({"n": list(range(300)), "m": list(range(300))})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=100)
    batches = ParquetFile(tmp_path / "t.parquet").iter_batches(["n", "absent"], start, stop)
    assert [row for b in batches for row in b.to_pylist()] == [{"n": n} for n in range(300)[start:stop]]


def read_all(path: Path) -> None:
    budget = MemoryBudget(path)
    for batch in ParquetFile(path).iter_batches():
        budget.add(batch, as_objects=True)


def bomb_of_nulls(path: Path) -> None:
    pq.write_table(pa.table({"a": pa.nulls(100_000_000, pa.int64())}), path)


def bomb_of_a_dictionary(path: Path) -> None:
    pq.write_table(pa.table({"a": pa.DictionaryArray.from_arrays([0] * 100_000, ["y" * 2_000_000])}), path)


def bomb_of_a_list(path: Path) -> None:
    values = pa.nulls(60_000_000, pa.bool_())
    pq.write_table(pa.table({"a": pa.ListArray.from_arrays([0, len(values)], values)}), path)


def bomb_of_columns(path: Path) -> None:
    pq.write_table(pa.table({f"c{i}": pa.nulls(1, pa.int8()) for i in range(5_000)}), path)


def nested_deeply(path: Path) -> None:
    kind = pa.int8()
    for _ in range(200):
        kind = pa.list_(kind)
    pq.write_table(pa.table({"a": pa.nulls(1, kind)}), path)


def no_parquet(path: Path) -> None:
    path.write_bytes(b"PAR1 and so on PAR1")


def cut_short(path: Path) -> None:
    pq.write_table(pa.table({"a": list(range(100_000))}), path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + content[-400:])


BOMBS = [bomb_of_nulls, bomb_of_a_dictionary, bomb_of_a_list, bomb_of_columns, nested_deeply, no_parquet, cut_short]


@pytest.mark.parametrize("make", BOMBS, ids=lambda make: make.__name__)
def test_what_is_no_table_of_a_sensible_size_is_refused(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "t.parquet"
    make(path)
    with pytest.raises(ParquetError):
        read_all(path)
    ok = write(tmp_path / "ok.parquet", n=[1])  # another process reads the next one
    assert [b.to_pylist() for b in ok.iter_batches()] == [[{"n": 1}]]


def test_a_folder_and_a_file_that_is_not_there_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(ParquetError, match="no regular file"):
        ParquetFile(tmp_path).iter_batches()
    with pytest.raises(FileNotFoundError):
        ParquetFile(tmp_path / "none.parquet").iter_batches()
