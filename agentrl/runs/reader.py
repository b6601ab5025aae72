"""Episodes as a run folder keeps them, read back: rows, and trajectories as they were."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.errors import UserError
from agentrl.types import Author, CallRecord, Fault, Segment, Stop, Trajectory

_FILE = re.compile(r"([\w.-]+)-(\d+)\.parquet$")
_NAME = re.compile(r"(?:([\w.-]+)-)?(\d+):(\d+)$")
Row = Mapping[str, Any]
_OUTLINE = ["task", "member", "rewards", "weights", "stop", "fault", "fault_message", "calls", "temperature"]
_OUTLINE += ["segments.list.element.author"]


class Place(NamedTuple):
    """Where an episode stands: ``train-3:17`` is row 17 of ``train-000003.parquet``; ``3:17`` is the same."""

    split: str
    step: int
    row: int

    def __str__(self) -> str:
        return f"{self.split}-{self.step}:{self.row}"


def place(name: str) -> Place:
    """Raises UserError: it is no name of an episode."""
    found = _NAME.match(name)
    if found is None or ".." in name:
        raise UserError(f"an episode is SPLIT-STEP:ROW, such as train-3:17 or 3:17, not {name!r}")
    return Place(found[1] or "train", int(found[2]), int(found[3]))


def files(run: Path, splits: Sequence[str] = ()) -> list[tuple[str, int, Path]]:
    """Split, step and path, in order. Raises UserError where there are none."""
    found = [(m[1], int(m[2]), p) for p in (run / "trajectories").glob("*.parquet") if (m := _FILE.match(p.name))]
    wanted = sorted((f for f in found if not splits or f[0] in splits), key=lambda f: (f[0] != "train", f[0], f[1]))
    if not wanted:
        raise UserError(f"{str(run)!r} holds no episodes{' of split ' + ', '.join(splits) if splits else ''}")
    return wanted


def rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Read one at a time, whole or some columns; those that an older run lacks are left out.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        file = pq.ParquetFile(path)
        have = None if columns is None else [n for n in columns if n.partition(".")[0] in file.schema_arrow.names]
        for batch in file.iter_batches(64 if columns is None else 1024, columns=have):
            yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def outlines(path: Path) -> Iterator[Row]:
    """Read episodes without their tokens, one at a time: what a measurement needs. Raises UserError as `rows` does."""
    return rows(path, _OUTLINE)


def outline(row: Row) -> Trajectory:
    """Make an episode of an outline: its segments have no tokens, and it has no messages."""
    return Trajectory(
        task=row["task"],
        segments=tuple(_empty(s["author"]) for s in row["segments"]),
        messages=(),
        stop=Stop(row["stop"]),
        rewards={r["name"]: r["value"] for r in row["rewards"]},
        weights={w["name"]: w["value"] for w in row.get("weights") or ()},
        calls=tuple(CallRecord(**c) for c in row["calls"]),
        fault=Fault(row["fault"], row["fault_message"] or "") if row["fault"] else None,
        temperature=row.get("temperature"),
    )


def without_tokens(t: Trajectory) -> Trajectory:
    """Make the outline of an episode, as `outline` does of a stored one."""
    segments = tuple(_empty(s.author) for s in t.segments)
    return replace(t, segments=segments, messages=(), step_rewards=(), timings={}, info={})


def _empty(author: Author) -> Segment:
    return Segment(author, (), (), ()) if author == "model" else Segment(author, ())


def row(run: Path, where: Place) -> Row:
    """Raises UserError: there is no such file, or no such row in it."""
    path = run / "trajectories" / f"{where.split}-{where.step:06d}.parquet"
    if not path.is_file():
        raise UserError(f"the run {str(run)!r} has no {path.name}")
    try:
        file = pq.ParquetFile(path)
        left, count = where.row, file.metadata.num_rows
        for group in range(file.num_row_groups):
            if left < (size := file.metadata.row_group(group).num_rows):
                found: Row = file.read_row_group(group).slice(left, 1).to_pylist()[0]
                return found
            left -= size
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None
    raise UserError(f"{path.name} has the episodes 0 to {count - 1}, not {where.row}")


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read: {str(error).splitlines()[0]}")


def trajectory(row: Row) -> Trajectory:
    """Make the episode as it was; ``info`` as far as it was kept, which is as JSON, cut where it was long."""
    return Trajectory(
        task=row["task"],
        segments=tuple(_segment(s) for s in row["segments"]),
        messages=tuple(json.loads(row["messages"])),
        stop=Stop(row["stop"]),
        rewards={r["name"]: r["value"] for r in row["rewards"]},
        weights={w["name"]: w["value"] for w in row.get("weights") or ()},
        step_rewards=tuple(row["step_rewards"]),
        timings={t["name"]: t["value"] for t in row["timings"]},
        calls=tuple(CallRecord(**c) for c in row["calls"]),
        fault=Fault(row["fault"], row["fault_message"] or "") if row["fault"] else None,
        info=json.loads(row.get("info") or "{}"),
        temperature=row.get("temperature"),
    )


def _segment(s: Row) -> Segment:
    own = s["author"] == "model"
    return Segment(
        s["author"],
        tuple(s["token_ids"]),
        tuple(s["logprobs"]) if own else None,
        tuple(s["versions"]) if own else None,
    )
