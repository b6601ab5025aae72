"""A run folder, open for reading: its index and its metrics, kept up to date while the run goes on."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from agentrl.errors import UserError, suggest
from agentrl.evaluation.scope import read_scope
from agentrl.settings.catalogue import describe_own_entry
from agentrl.settings.documents import read_json, read_toml_table
from agentrl.settings.registry import EntryKind
from agentrl.view import index
from agentrl.view.index_cache import FileStamp, read_cached_index, write_cached_index
from agentrl.view.metrics_file import MetricsFile
from agentrl.view.run_messages import RunMessages

BATCH = 48  # files read together
DAMAGED = 5  # files that are named
READERS = 2  # threads: the page is to be served meanwhile
SHOW_S = 0.5  # while many files are read, between two partial snapshots
LIVE_S = 120.0  # a run that wrote nothing for so long, and for three steps, has ended or stalled
_FILE = re.compile(r"([\w.-]+)-(\d+)\.parquet$")


class Snapshot(NamedTuple):
    """The episodes at one moment. ``version`` changes whenever anything does."""

    version: int
    table: pa.Table  # index.SCHEMA
    progress: float  # share of the files that are in it


class _ChosenEntry(NamedTuple):
    """A run's choice by name: a loss, an advantage ...; empty where it is not known."""

    name: str
    explain: str


class Store:
    """A run folder; ``refresh`` reads new data. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.resolve().name
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self.messages = RunMessages(folder / "events.jsonl")
        self.now = Snapshot(0, index.SCHEMA.empty_table(), 0.0)
        self.problems: dict[str, str] = {}  # files that cannot be read, and why
        self.left_out: dict[str, Mapping[int, str]] = {}  # by file the numbers of damaged rows, and why
        self._files: dict[str, tuple[FileStamp, pa.Table]] = {}
        self._lock = threading.Lock()
        self._refreshed = 0.0

    @cached_property
    def config(self) -> dict[str, Any]:
        try:
            return read_toml_table(self.folder / "config.toml")
        except (OSError, ValueError):
            return {}

    def damage(self) -> list[str]:
        """Return a sentence for each part of the run that cannot be read, and so is not shown."""
        sentences = [
            f"trajectories/{name} cannot be read: {why}" for name, why in sorted(self.problems.items())[:DAMAGED]
        ]
        if (more := len(self.problems) - DAMAGED) > 0:
            sentences.append(f"{more} more files of episodes cannot be read")
        for name, rows in sorted(self.left_out.items())[:DAMAGED]:
            number, why = next(iter(rows.items()))
            what = f"row {number} is" if len(rows) == 1 else f"{len(rows)} rows are, such as row {number},"
            sentences.append(f"trajectories/{name}: {what} damaged and left out: {why}")
        if (more := len(self.left_out) - DAMAGED) > 0:
            sentences.append(f"{more} more files of episodes have damaged rows")
        if lines := self.metrics.unreadable:
            sentences.append(f"{lines} line{'s' * (lines != 1)} of metrics.jsonl cannot be read")
        try:
            read_scope(self.folder)
        except UserError as error:
            sentences.append(str(error))
        if not self.config:
            sentences.append("config.toml is missing or damaged: the settings are not known")
        return sentences

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a setting by its dotted name."""
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return default if value is None else value

    def entry(self, kind: EntryKind) -> _ChosenEntry:
        """Return the loss, the advantage ... of the run, as its folder describes it.

        A run that does not have ``algorithm.json`` is described by its settings, as far as they name agentrl's own.
        """
        recorded = self._algorithm.get(kind)
        if not isinstance(recorded, dict):
            recorded = describe_own_entry(kind, self.config)
        return _ChosenEntry(*(str(recorded.get(name) or "") for name in _ChosenEntry._fields))

    @cached_property
    def _algorithm(self) -> dict[str, Any]:
        try:
            recorded = read_json(self.folder / "algorithm.json")
        except (OSError, ValueError):
            return {}
        return recorded if isinstance(recorded, dict) else {}

    def tools(self) -> list[list[dict[str, Any]]]:
        """Read the lists of tools that were offered, as schemas; none if an older run did not keep them."""
        try:
            lists = read_json(self.folder / "tools.json")
        except (OSError, ValueError):
            return []
        tool_lists = [tools for tools in lists if isinstance(tools, list)] if isinstance(lists, list) else []
        return [[t for t in tools if isinstance(t, dict)] for tools in tool_lists]

    @property
    def ended(self) -> bool:
        return (self.folder / "summary.json").exists()

    @property
    def live(self) -> bool:
        """True if the run seems to go on: it has no summary yet, and wrote something lately."""
        _, times = self.metrics.series("step_time")
        patience = max(LIVE_S, 3 * times[-1] if times else 0.0)
        return not self.ended and time.time() - self._last_write() < patience

    def _last_write(self) -> float:
        times = [stamp.mtime_ns / 1e9 for stamp, _ in self._files.values()]
        for path in (self.metrics.path, self.messages.path, *(self.folder / n for n in ("config.toml", "waits.json"))):
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times, default=0.0)

    def refresh(self, older_than_s: float = 0.0) -> None:
        """Read new data, unless another thread does, or it was done less than ``older_than_s`` ago."""
        if time.monotonic() - self._refreshed < older_than_s or not self._lock.acquire(blocking=False):
            return
        try:
            if self.metrics.refresh() | self.messages.refresh():
                self._publish(self.now.progress)
            self._refresh_index()
            self._refreshed = time.monotonic()
        finally:
            self._lock.release()

    def read_step(self, split: str, step: int) -> None:
        """Read one step's episodes, and the metrics, however many files the run has; ``now`` has that step alone."""
        self.metrics.refresh()
        self.messages.refresh()
        name = self.episode_file(split, step).name
        stamps = {known: stamp for known, stamp in self._stamp_files() if known == name}
        for _, batch in _read_files(self.folder, list(stamps), self.problems, self.left_out):
            self._files = {known: (stamps[known], table) for known, table in batch.items()}
        self._publish(1.0)

    def _refresh_index(self) -> None:
        stamps = dict(self._stamp_files())
        if not self._files and stamps:
            self._files = read_cached_index(self.folder, stamps)
        known = {name: entry for name, entry in self._files.items() if stamps.get(name) == entry[0]}
        gone, had, self._files = len(self._files) - len(known), len(known), known
        new = sorted((name for name in stamps if name not in known), key=_sort_key, reverse=True)
        self.problems = {name: why for name, why in self.problems.items() if name in new}
        self.left_out = {name: rows for name, rows in self.left_out.items() if name in known}
        started = time.monotonic()
        shown = 0.0
        for done, batch in _read_files(self.folder, new, self.problems, self.left_out):
            self._files |= {name: (stamps[name], table) for name, table in batch.items()}
            if time.monotonic() - shown > SHOW_S and had + done < len(stamps):
                self._publish((had + done) / len(stamps))
                shown = time.monotonic()
        if new or gone or self.now.progress < 1.0:
            self._publish(1.0)
        if time.monotonic() - started > 0.5:
            write_cached_index(self.folder, {n: f for n, f in self._files.items() if n not in self.left_out})

    def _stamp_files(self) -> Iterator[tuple[str, FileStamp]]:
        for path in (self.folder / "trajectories").glob("*.parquet"):
            try:
                stat = path.stat()
            except OSError:  # removed meanwhile
                continue
            if _FILE.match(path.name):
                yield path.name, FileStamp(stat.st_mtime_ns, stat.st_size)

    def _publish(self, progress: float) -> None:
        tables = [self._files[name][1] for name in sorted(self._files, key=_sort_key)]
        table = pa.concat_tables(tables).combine_chunks() if tables else index.SCHEMA.empty_table()
        self.now = Snapshot(self.now.version + 1, table, progress)

    def episode_file(self, split: str, step: int) -> Path:
        """Return the path of a step's episodes."""
        return self.folder / "trajectories" / f"{split}-{step:06d}.parquet"


def _read_files(
    folder: Path, names: Sequence[str], problems: dict[str, str], left_out: dict[str, Mapping[int, str]]
) -> Iterator[tuple[int, dict[str, pa.Table]]]:
    """Yield the number of files read so far, and the tables of some by file, the newest first."""

    def read(name: str) -> index.FileColumns | None:
        path = folder / "trajectories" / name
        try:
            return index.read_index_columns(path)
        except UserError as error:
            problems[name] = str(error).removeprefix(f"{path} ").removeprefix("was ").removeprefix("cannot be read: ")
        return None

    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(names), BATCH):
            batch = names[start : start + BATCH]
            raws = {name: raw for name, raw in zip(batch, pool.map(read, batch), strict=True) if raw is not None}
            left_out.update({name: raw.left_out for name, raw in raws.items() if raw.left_out})
            if raws:
                yield start + len(batch), dict(zip(raws, index.build_episode_index(list(raws.values())), strict=True))


def _sort_key(name: str) -> tuple[int, str]:
    match = _FILE.match(name)
    return (int(match[2]), "" if match[1] == "train" else match[1]) if match else (0, name)


def _is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() or (folder / "trajectories").is_dir()


def open_runs(names: Sequence[str]) -> list[Store]:
    """Open each run folder, and each run folder in a folder of such.

    Raises:
        UserError: one is no run folder.
    """
    stores: dict[Path, Store] = {}
    for name in names:
        path = Path(name)
        inside = sorted(p for p in path.iterdir() if _is_run(p)) if path.is_dir() and not _is_run(path) else [path]
        if not inside or not _is_run(inside[0]):
            raise UserError(_explain_no_run(path))
        for folder in inside:
            stores.setdefault(folder.resolve(), Store(folder))
    return list(stores.values())


def _explain_no_run(path: Path) -> str:
    if path.is_dir():
        return f"{str(path)!r} is no run folder: it has no metrics.jsonl and no trajectories"
    beside = [p.name for p in path.parent.iterdir() if _is_run(p)] if path.parent.is_dir() else []
    return f"no run folder {str(path)!r}{suggest(path.name, beside)}"
