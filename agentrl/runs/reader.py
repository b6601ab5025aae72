"""The reader of a run folder's episodes: rows, and trajectories made of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from agentrl import __version__
from agentrl.errors import UserError
from agentrl.runs.sound_rows import SoundRows, select_sound_rows
from agentrl.runs.writer import READABLE, SCHEMA_VERSION
from agentrl.runtime.parquet_file import MemoryBudget, ParquetError, ParquetFile
from agentrl.settings.documents import parse_json
from agentrl.types import Author, CallRecord, Fault, Message, Segment, Stop, Thread, ThreadRole, Trajectory

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
_OUTLINE = ["task", "sample", "reward", "rewards", "weights", "stop", "fault", "fault_message", "calls", "temperature"]
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


def read_batches(
    path: Path, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
) -> Iterator[SoundRows]:
    """Read the sound rows of a file of episodes, some megabytes at a time; what is damaged costs its row alone.

    Args:
        columns: those that an older run lacks are left out; all by default.
        start, stop: the first row, and the one after the last.

    Raises:
        UserError: the file cannot be read, or is no file of episodes.
    """
    try:
        file, at = ParquetFile(path), start
        batches = file.iter_batches(columns, start, stop)
        _check_columns(path, file)
        for batch in batches:
            yield select_sound_rows(batch, at)
            at += batch.num_rows
    except (OSError, ParquetError, ValueError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def read_rows(
    path: Path, columns: Sequence[str] | None = None, left_out: dict[int, str] | None = None
) -> Iterator[tuple[int, Row]]:
    """Read a file's rows with their numbers, one at a time, with all columns or some, as far as they are there.

    Args:
        left_out: takes the reason for each damaged row, by its number. Without it such a row is an error.

    Raises:
        UserError: the file cannot be read, or a row.
    """
    for sound in read_batches(path, columns):
        if sound.left_out and left_out is None:
            number, why = next(iter(sound.left_out.items()))
            raise UserError(f"{path}: row {number} is damaged: {why}")
        if left_out is not None:
            left_out |= sound.left_out
        yield from zip(map(int, sound.numbers), sound.table.to_pylist(), strict=True)


def read_outlines(path: Path) -> Iterator[Row]:
    """Read rows without their tokens, one at a time, as an evaluation needs them. Raises UserError as `read_rows`."""
    return (row for _, row in read_rows(path, _OUTLINE))


def build_outline(row: Row) -> Trajectory:
    """Make the trajectory of an outline: its segments have no tokens, and it has no messages."""
    return Trajectory(
        task=row["task"],
        segments=tuple(_empty(s["author"]) for s in row["segments"]),
        messages=(),
        stop=Stop(row["stop"]),
        rewards={r["name"]: r["value"] for r in row["rewards"]},
        weights={w["name"]: w["value"] for w in row.get("weights") or ()},
        calls=tuple(map(_build_call, row["calls"])),
        fault=_build_fault(row),
        temperature=row.get("temperature"),
        shared_turns=row.get("shared_turns") or 0,
    )


def strip_tokens(t: Trajectory) -> Trajectory:
    """Return a trajectory without tokens and messages, as `build_outline` makes it of a row."""
    segments = tuple(_empty(s.author) for s in t.segments)
    return replace(t, segments=segments, messages=(), step_rewards=(), timings={}, info={}, threads=())


def _build_call(call: Row) -> CallRecord:
    start, end = call.get("start"), call.get("end")
    span = None if start is None or end is None else (start, end)
    return CallRecord(call["turn"], call["name"], call["status"], call["seconds"], span)


def _build_fault(row: Row) -> Fault | None:
    """Make the fault of a row; the floor is its reward where the episode provoked it, and it has none otherwise."""
    return Fault(row["fault"], row["fault_message"] or "", row.get("reward") is not None) if row["fault"] else None


def _empty(author: Author) -> Segment:
    return Segment(author, (), (), ()) if author == "model" else Segment(author, ())


def read_row(run: Path, where: EpisodeId) -> Row:
    """Read an episode's row. Raises UserError: there is no such file, or no such row in it."""
    path = run / "trajectories" / f"{where.split}-{where.step:06d}.parquet"
    if not path.is_file():
        raise UserError(f"the run {str(run)!r} has no {path.name}")
    for sound in read_batches(path, start=where.row, stop=where.row + 1):
        for why in sound.left_out.values():
            raise UserError(f"{where} is damaged: {why}")
        row: Row = sound.table.to_pylist()[0]
        return row
    count = int(ParquetFile(path).metadata["rows"])
    raise UserError(f"{path.name} has the episodes 0 to {count - 1}, not {where.row}")


def read_columns(path: Path, columns: Sequence[str], budget: MemoryBudget | None = None) -> SoundRows:
    """Read some columns of all sound rows as one table; those that an older run lacks are left out.

    Raises:
        UserError: the file cannot be read, or unpacks to more than the budget.
    """
    budget = budget or MemoryBudget(path)
    parts: list[SoundRows] = []
    for sound in read_batches(path, columns):
        try:
            budget.add(sound.table)
        except ParquetError as error:
            raise _unreadable(path, error) from None
        parts.append(sound)
    if not parts:
        return SoundRows(pa.RecordBatch.from_pylist([], schema=pa.schema([])), np.zeros(0, dtype=np.int64), {})
    left_out = {number: why for part in parts for number, why in part.left_out.items()}
    table = pa.Table.from_batches([part.table for part in parts]).combine_chunks()
    return SoundRows(table, np.concatenate([part.numbers for part in parts]), left_out)


def _check_columns(path: Path, file: ParquetFile) -> None:
    """Raise UserError if it is another table, or of another version."""
    version = file.metadata.get("agentrl_trajectories", SCHEMA_VERSION)
    if version not in READABLE:
        raise UserError(
            f"{path} was written by another agentrl, version {version:.40} of trajectories; this is agentrl "
            f"{__version__}, version {SCHEMA_VERSION}: read it with the one that wrote it"
        )
    if missing := [name for name in REQUIRED if name not in file.schema.names]:
        raise UserError(f"{path} is no file of episodes: it has no column {missing[0]!r}")


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read: {str(error).splitlines()[0].rstrip('.')}")


def build_trajectory(row: Row) -> Trajectory:
    """Make the trajectory of a row; its ``info`` is what was kept of it, as JSON. Raises UserError: it is damaged."""
    try:
        messages, info = parse_messages(row["messages"]), parse_json(row.get("info") or "{}")
        threads = build_threads(row)
        if not isinstance(info, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise UserError(f"the episode is damaged: its messages, or its info, cannot be read: {error}") from None
    return Trajectory(
        task=row["task"],
        segments=tuple(_segment(s) for s in row["segments"]),
        messages=messages,
        stop=Stop(row["stop"]),
        rewards={r["name"]: r["value"] for r in row["rewards"]},
        weights={w["name"]: w["value"] for w in row.get("weights") or ()},
        step_rewards=tuple(row.get("step_rewards") or ()),
        timings={t["name"]: t["value"] for t in row.get("timings") or ()},
        calls=tuple(map(_build_call, row["calls"])),
        fault=_build_fault(row),
        info=info,
        temperature=row.get("temperature"),
        shared_turns=row.get("shared_turns") or 0,
        threads=threads,
    )


def build_threads(row: Row) -> tuple[Thread, ...]:
    """Make the threads of a row, each with the messages that it shares; those of an older run are none.

    Raises:
        ValueError: they are damaged.
    """
    threads: list[Thread] = []
    for one in row.get("threads") or ():
        parent, shared = one["parent"], one["shared"] or 0
        if parent is not None and not 0 <= parent < len(threads):
            raise ValueError("a thread whose parent does not stand before it")
        before = threads[parent].messages if parent is not None else ()
        if not 0 <= shared <= len(before):
            raise ValueError("a thread that shares more messages than its parent has")
        messages = before[:shared] + parse_messages(one["messages"])
        role = ThreadRole(one["role"])
        threads.append(Thread(role, parent, one["after"], tuple(one["turns"] or ()), shared, messages))
    if threads and len(threads) != sum(s["author"] == "prompt" for s in row["segments"]):
        raise ValueError("threads that are not one a context")
    return tuple(threads)


def _segment(s: Row) -> Segment:
    own = s["author"] == "model" and s["logprobs"] is not None
    return Segment(
        s["author"],
        tuple(s["token_ids"]),
        tuple(s["logprobs"]) if own else None,
        tuple(s["versions"]) if own else None,
    )


def parse_messages(text: str) -> tuple[Message, ...]:
    """Parse a conversation as it is stored. Raises ValueError: it is no list of messages."""
    messages = parse_json(text)
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ValueError("it is no list of messages")
    return tuple(messages)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
        return False
    calls = message.get("tool_calls", [])
    return isinstance(calls, list) and all(
        isinstance(call, dict)
        and isinstance(function := call.get("function"), dict)
        and isinstance(call.get("id"), str)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), dict)
        for call in calls
    )
