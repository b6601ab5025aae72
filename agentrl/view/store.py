"""A run folder, open for looking: its index and its metrics, kept up while the run goes on."""

from __future__ import annotations

import json
import re
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from agentrl.errors import UserError, nearest
from agentrl.view import index
from agentrl.view.curves import Curves
from agentrl.view.kept import Mark, read_kept, write_kept
from agentrl.view.told import Told

BATCH = 48  # files read together
READERS = 2  # threads: the page is to be served meanwhile
SHOW_S = 0.5  # while many are read, what is known is shown so often
LIVE_S = 120.0  # a run that wrote nothing for so long, and for three steps, has ended, or stands
_FILE = re.compile(r"([\w.-]+)-(\d+)\.parquet$")


class Snapshot(NamedTuple):
    """The episodes as they were at one moment. ``version`` changes whenever anything does."""

    version: int
    table: Any  # index.SCHEMA
    progress: float  # of the files there are, how many are in it


class Store:
    """Opened by a folder; ``refresh`` looks for what is new. Safe to ask from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.resolve().name
        self.curves = Curves(folder / "metrics.jsonl")
        self.told = Told(folder / "told.jsonl")
        self.now = Snapshot(0, index.empty(), 0.0)
        self.problems: dict[str, str] = {}  # files that cannot be read, and why
        self._files: dict[str, tuple[Mark, Any]] = {}
        self._lock = threading.Lock()
        self._looked = 0.0

    @cached_property
    def config(self) -> dict[str, Any]:
        try:
            return tomllib.loads((self.folder / "config.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting by its dotted name."""
        found: Any = self.config
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return default if found is None else found

    def tools(self) -> list[list[dict[str, Any]]]:
        """Read the lists of tools that were offered, as schemas; none where an older run does not tell."""
        try:
            found = json.loads((self.folder / "tools.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        lists = [tools for tools in found if isinstance(tools, list)] if isinstance(found, list) else []
        return [[t for t in tools if isinstance(t, dict)] for tools in lists]

    @property
    def ended(self) -> bool:
        return (self.folder / "summary.json").exists()

    @property
    def live(self) -> bool:
        """Whether it goes on, as far as can be told: no summary yet, and something was written lately."""
        _, times = self.curves.series("step_time")
        patience = max(LIVE_S, 3 * times[-1] if times else 0.0)
        return not self.ended and time.time() - self._written() < patience

    def _written(self) -> float:
        times = [mark.mtime_ns / 1e9 for mark, _ in self._files.values()]
        for path in (self.curves.path, self.told.path, self.folder / "config.toml"):
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times, default=0.0)

    def refresh(self, older_than_s: float = 0.0) -> None:
        """Look again, unless another thread is at it, or it was done lately."""
        if time.monotonic() - self._looked < older_than_s or not self._lock.acquire(blocking=False):
            return
        try:
            if self.curves.refresh() | self.told.refresh():
                self._show(self.now.progress)
            self._look()
            self._looked = time.monotonic()
        finally:
            self._lock.release()

    def _look(self) -> None:
        marks = dict(self._marks())
        if not self._files and marks:
            self._files = read_kept(self.folder, marks)
        known = {name: kept for name, kept in self._files.items() if marks.get(name) == kept[0]}
        gone, had, self._files = len(self._files) - len(known), len(known), known
        new = sorted((name for name in marks if name not in known), key=_order, reverse=True)
        self.problems = {name: why for name, why in self.problems.items() if name in new}
        started = time.monotonic()
        shown = 0.0
        for done, batch in _read(self.folder, new, self.problems):
            self._files |= {name: (marks[name], table) for name, table in batch.items()}
            if time.monotonic() - shown > SHOW_S and had + done < len(marks):
                self._show((had + done) / len(marks))
                shown = time.monotonic()
        if new or gone or self.now.progress < 1.0:
            self._show(1.0)
        if time.monotonic() - started > 0.5:
            write_kept(self.folder, self._files)

    def _marks(self) -> Iterator[tuple[str, Mark]]:
        for path in (self.folder / "trajectories").glob("*.parquet"):
            try:
                stat = path.stat()
            except OSError:  # taken back meanwhile
                continue
            if _FILE.match(path.name):
                yield path.name, Mark(stat.st_mtime_ns, stat.st_size)

    def _show(self, progress: float) -> None:
        tables = [self._files[name][1] for name in sorted(self._files, key=_order)]
        table = pa.concat_tables(tables).combine_chunks() if tables else index.empty()
        self.now = Snapshot(self.now.version + 1, table, progress)

    def file_of(self, split: str, step: int) -> Path:
        return self.folder / "trajectories" / f"{split}-{step:06d}.parquet"


def _read(folder: Path, names: Sequence[str], problems: dict[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Tables by file, some files at a time, the newest first."""

    def read(name: str) -> Any:
        try:
            return index.read_file(folder / "trajectories" / name)
        except (OSError, pa.ArrowException) as error:
            problems[name] = str(error).splitlines()[0]
            return None

    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(names), BATCH):
            batch = names[start : start + BATCH]
            raws = {name: raw for name, raw in zip(batch, pool.map(read, batch), strict=True) if raw is not None}
            if raws:
                yield start + len(batch), dict(zip(raws, index.indexed(list(raws.values())), strict=True))


def _order(name: str) -> tuple[int, str]:
    found = _FILE.match(name)
    return (int(found[2]), "" if found[1] == "train" else found[1]) if found else (0, name)


def is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() or (folder / "trajectories").is_dir()


def open_runs(names: Sequence[str]) -> list[Store]:
    """A store of each run folder; of a folder of run folders, each in it.

    Raises:
        UserError: one is no run folder.
    """
    found: dict[Path, Store] = {}
    for name in names:
        path = Path(name)
        inside = sorted(p for p in path.iterdir() if is_run(p)) if path.is_dir() and not is_run(path) else [path]
        if not inside or not is_run(inside[0]):
            raise UserError(_not_a_run(path))
        for folder in inside:
            found.setdefault(folder.resolve(), Store(folder))
    return list(found.values())


def _not_a_run(path: Path) -> str:
    if path.is_dir():
        return f"{str(path)!r} is no run folder: it has no metrics.jsonl and no trajectories"
    beside = [p.name for p in path.parent.iterdir() if is_run(p)] if path.parent.is_dir() else []
    return f"no run folder {str(path)!r}{nearest(path.name, beside)}"
