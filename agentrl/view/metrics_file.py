"""The metrics of a run, as they are written: a line a step, and a line a measurement."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Columns = dict[str, list[list[float]]]
TAIL = 64  # bytes before the end of what was read, by which a file that was rewound is known


class Curves:
    """``metrics.jsonl``, read on where the last look ended.

    ``generation`` goes up when lines were taken back, as a run that goes on from a checkpoint does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self.generation = 0
        self.unreadable = 0
        self._columns: Columns = {}
        self._lock = threading.Lock()
        self._read = 0
        self._tail = b""

    def refresh(self) -> bool:
        """Read what is new; whether there was anything."""
        try:
            size = self.path.stat().st_size
        except OSError:
            size = 0
        if size == self._read and not size:
            return False
        with self._lock:
            if size < self._read or not self._goes_on():
                self._forget()
            if size == self._read:
                return False
            with self.path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]  # the last line may be half written
            self._add(whole)
        return bool(whole)

    def _goes_on(self) -> bool:
        if not self._tail:
            return True
        with self.path.open("rb") as file:
            file.seek(self._read - len(self._tail))
            return file.read(len(self._tail)) == self._tail

    def _forget(self) -> None:
        self.lines, self._columns, self._read, self._tail, self.unreadable = [], {}, 0, b"", 0
        self.generation += 1

    def _add(self, whole: bytes) -> None:
        before = len(self.lines)
        for line in whole.splitlines():
            found = _line(line)
            if found is None:
                self.unreadable += 1
            else:
                self.lines.append(found)
        _append(self._columns, self.lines[before:])
        self._read += len(whole)
        self._tail = (self._tail + whole)[-TAIL:]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, where it was written."""
        points = [(int(line["step"]), float(v)) for line in self.lines if (v := line.get(name)) is not None]
        return [s for s, _ in points], [v for _, v in points]

    def names(self) -> list[str]:
        return sorted({name for line in self.lines for name in line} - {"step"})

    def columns(self, since: int, generation: int) -> tuple[int, int, int, Columns]:
        """Of the lines from ``since`` on each metric's steps and values; of all where ``generation`` has passed.

        Returns the first line that is in it, how many lines there are, the generation, and the columns.
        """
        with self._lock:
            since = min(since, len(self.lines)) if generation == self.generation else 0
            found: Columns = {}
            if since:
                _append(found, self.lines[since:])
            else:
                found = {name: [list(steps), list(values)] for name, (steps, values) in self._columns.items()}
            return since, len(self.lines), self.generation, found

    def version_at(self, step: int, split: str) -> int | None:
        """The policy's version when a step's train episodes were learned from, or its held-out ones played."""
        steps, versions = self.series("policy_version")
        known = [v for s, v in zip(steps, versions, strict=True) if (s < step if split == "train" else s <= step)]
        if known:
            return int(known[-1])
        return 0 if steps else None


def _append(columns: Columns, lines: Iterable[dict[str, Any]]) -> None:
    for line in lines:
        for name, value in line.items():
            if value is not None and name != "step":
                steps, values = columns.setdefault(name, [[], []])
                steps.append(line["step"])
                values.append(float(f"{value:.6g}"))


def _line(text: bytes) -> dict[str, Any] | None:
    """Numbers by name; what is no number is left out."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        return None
    return {k: v for k, v in found.items() if v is None or isinstance(v, int | float)}
