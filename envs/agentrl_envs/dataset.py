"""Rows of a dataset: JSONL, Parquet, a Hugging Face dataset, or any sequence of dicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl import ContractError, UserError

Row = dict[str, Any]


def load_rows(data: Any, split: str = "train") -> Sequence[Row]:
    """Load the rows of ``data``: a path, a Hugging Face dataset (``name`` or ``name:config``), or the rows themselves.

    Raises:
        UserError: there is no such file or dataset, or a line in it is no JSON object.
    """
    if not isinstance(data, str | Path):
        return _sequence(data)
    path = Path(data)
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return _jsonl(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    return _hub(str(data), split)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"no dataset {str(path)!r}: there is no such file (from {Path.cwd()})")
    return path


def _jsonl(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(_existing(path).read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: a row must be a JSON object, not {line.strip().decode():.60}")
        rows.append(row)
    return rows


def _parquet(path: Path) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[Row] = pq.read_table(_existing(path)).to_pylist()
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is no Parquet file: {error}") from None
    return rows


def _hub(name: str, split: str) -> Sequence[Row]:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"no dataset {name!r}: not a .jsonl or .parquet file; for Hugging Face datasets: pip install datasets"
        ) from None
    path, _, config = name.partition(":")
    try:
        loaded: Sequence[Row] = datasets.load_dataset(path, config or None, split=split)
    except Exception as error:  # the hub's many kinds: not found, offline, gated, no such split
        raise UserError(f"cannot load dataset {name!r}, split {split!r}: {type(error).__name__}: {error}") from error
    return loaded


def _sequence(data: Any) -> Sequence[Row]:
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, dict):
        raise ContractError(f"env.data must be a path, a dataset's name, or a sequence of rows; not {data!r:.80}")
    rows: Sequence[Row] = data
    return rows
