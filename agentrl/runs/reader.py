"""The reader of a run folder's episodes: rows, and trajectories made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl import __version__
from agentrl.errors import UserError
from agentrl.runs.writer import SCHEMA_VERSION
from agentrl.types import Author, CallRecord, Fault, Segment, Stop, Trajectory

_FILE = re.compile(r"([\w.-]+)-(\d+)\.parquet$")
_NAME = re.compile(r"(?:([\w.-]+)-)?(\d+):(\d+)$")
Row = Mapping[str, Any]
REQUIRED = (
    "task",
    "sample",
    "rewards",
    "stop",
    "fault",
    "segments",
    "messages",
    "calls",
)  # in each version of the schema
_OUTLINE = ["task", "sample", "rewards", "weights", "stop", "fault", "fault_message", "calls", "temperature"]
_OUTLINE += ["shared_turns", "segments.list.element.author"]


class EpisodeId(NamedTuple):
    """The name of a stored episode: ``train-3:17`` is row 17 of ``train-000003.parquet``; ``3:17`` is the same."""

    split: str
    step: int
    row: int

    def __str__(self) -> str:
        return f"{self.split}-{self.step}:{self.row}"


def parse_episode_id(name: str) -> EpisodeId:
    """Parse the name of an episode. Raises UserError: it is none."""
    match = _NAME.match(name)
    if match is None or ".." in name:
        raise UserError(f"an episode is SPLIT-STEP:ROW, such as train-3:17 or 3:17, not {name!r}")
    return EpisodeId(match[1] or "train", int(match[2]), int(match[3]))


def list_files(run: Path, splits: Sequence[str] = ()) -> list[tuple[str, int, Path]]:
    """List the files of episodes as split, step and path, in order. Raises UserError if there are none."""
    files = [(m[1], int(m[2]), p) for p in (run / "trajectories").glob("*.parquet") if (m := _FILE.match(p.name))]
    selected = sorted((f for f in files if not splits or f[0] in splits), key=lambda f: (f[0] != "train", f[0], f[1]))
    if not selected:
        raise UserError(f"{str(run)!r} holds no episodes{' of split ' + ', '.join(splits) if splits else ''}")
    return selected


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Read a file's rows one at a time, with all columns or some; those that an older run lacks are left out.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        file = _open(path)
        have = None if columns is None else [n for n in columns if n.partition(".")[0] in file.schema_arrow.names]
        for batch in file.iter_batches(64 if columns is None else 1024, columns=have):
            yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def read_outlines(path: Path) -> Iterator[Row]:
    """Read rows without their tokens, one at a time, as an evaluation needs them; as `read_rows`."""
    return read_rows(path, _OUTLINE)


def build_outline(row: Row) -> Trajectory:
    """Make the trajectory of an outline: its segments have no tokens, and it has no messages."""
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
        shared_turns=row.get("shared_turns") or 0,
    )


def strip_tokens(t: Trajectory) -> Trajectory:
    """Return a trajectory without tokens and messages, as `build_outline` makes it of a row."""
    segments = tuple(_empty(s.author) for s in t.segments)
    return replace(t, segments=segments, messages=(), step_rewards=(), timings={}, info={})


def _empty(author: Author) -> Segment:
    return Segment(author, (), (), ()) if author == "model" else Segment(author, ())


def read_row(run: Path, where: EpisodeId) -> Row:
    """Read an episode's row. Raises UserError: there is no such file, or no such row in it."""
    path = run / "trajectories" / f"{where.split}-{where.step:06d}.parquet"
    if not path.is_file():
        raise UserError(f"the run {str(run)!r} has no {path.name}")
    try:
        file = _open(path)
        left, count = where.row, file.metadata.num_rows
        for group in range(file.num_row_groups):
            if left < (size := file.metadata.row_group(group).num_rows):
                row: Row = file.read_row_group(group).slice(left, 1).to_pylist()[0]
                return row
            left -= size
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None
    raise UserError(f"{path.name} has the episodes 0 to {count - 1}, not {where.row}")


def _open(path: Path) -> pq.ParquetFile:
    """Open a file of episodes. Raises UserError if it is another table."""
    file = pq.ParquetFile(path)
    check_version(path, file.schema_arrow)
    if missing := [name for name in REQUIRED if name not in file.schema_arrow.names]:
        raise UserError(f"{path} is no file of episodes: it has no column {missing[0]!r}")
    return file


def check_version(path: Path, schema: pa.Schema) -> None:
    """Raise UserError if another version of the schema was written into a file of episodes."""
    version = (schema.metadata or {}).get(b"agentrl_trajectories", SCHEMA_VERSION.encode()).decode()
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path} was written by another agentrl, version {version} of trajectories; this is agentrl {__version__}, "
            f"version {SCHEMA_VERSION}: read it with the one that wrote it"
        )


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read: {str(error).splitlines()[0].rstrip('.')}")


def build_trajectory(row: Row) -> Trajectory:
    """Make the trajectory of a row; its ``info`` is what was kept of it, as JSON."""
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
        shared_turns=row.get("shared_turns") or 0,
    )


def _segment(s: Row) -> Segment:
    own = s["author"] == "model"
    return Segment(
        s["author"],
        tuple(s["token_ids"]),
        tuple(s["logprobs"]) if own else None,
        tuple(s["versions"]) if own else None,
    )
