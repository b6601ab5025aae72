"""The metrics of a run: a line a step, and a line an evaluation."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agentrl.settings.documents import parse_json
from agentrl.types import is_number

Columns = dict[str, list[list[float]]]
_PIECE = 16 << 20  # bytes that are read at once, and the most of a line
_MOST_VALUES = 5_000_000  # beyond these, lines are left out
TAIL = 64  # last bytes that were read, to recognize a file that was rewound


class MetricsFile:
    """``metrics.jsonl``, read from where the last refresh ended.

    ``generation`` rises when lines were removed, as a run does that resumes from a checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self.generation = 0
        self.unreadable = 0
        self._columns: Columns = {}
        self._lock = threading.Lock()
        self._read = 0
        self._values = 0
        self._tail = b""

    def refresh(self) -> bool:
        """Read new lines. Return True if there are any."""
        try:
            size = self.path.stat().st_size
        except OSError:
            size = 0
        if size == self._read and not size:
            return False
        with self._lock:
            if size < self._read or not self._continues():
                self._forget()
            if size == self._read:
                return False
            return self._read_new()

    def _read_new(self) -> bool:
        """Read the whole lines from where the last refresh ended, some megabytes at a time; return True for any."""
        before = self._read
        with self.path.open("rb") as file:
            file.seek(self._read)
            while self._values < _MOST_VALUES and (new := file.read(_PIECE)):
                whole = new[: new.rfind(b"\n") + 1]  # the last line may be half written
                if not whole and len(new) < _PIECE:
                    break
                if not whole:  # a line that no run writes
                    self.unreadable += 1
                    self._read += len(new)
                    continue
                self._add(whole)
                file.seek(self._read)
        return self._read > before

    def _continues(self) -> bool:
        if not self._tail:
            return True
        with self.path.open("rb") as file:
            file.seek(self._read - len(self._tail))
            return file.read(len(self._tail)) == self._tail

    def _forget(self) -> None:
        self.lines, self._columns, self._read, self._tail, self.unreadable = [], {}, 0, b"", 0
        self._values = 0
        self.generation += 1

    def _add(self, whole: bytes) -> None:
        before = len(self.lines)
        for line in whole.splitlines():
            values = _parse_line(line)
            if values is None:
                self.unreadable += 1
            else:
                self.lines.append(values)
                self._values += len(values)
        _append(self._columns, self.lines[before:])
        self._read += len(whole)
        self._tail = (self._tail + whole)[-TAIL:]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of a metric."""
        points = [(int(line["step"]), float(v)) for line in self.lines if (v := line.get(name)) is not None]
        return [s for s, _ in points], [v for _, v in points]

    def names(self) -> list[str]:
        return sorted({name for line in self.lines for name in line} - {"step"})

    def columns(self, since: int, generation: int) -> tuple[int, int, int, Columns]:
        """Return each metric's steps and values in the lines from ``since`` on; in all if ``generation`` is old.

        Returns:
            the first line that is included, the number of lines, the generation, and the columns.
        """
        with self._lock:
            since = min(since, len(self.lines)) if generation == self.generation else 0
            columns: Columns = {}
            if since:
                _append(columns, self.lines[since:])
            else:
                columns = {name: [list(steps), list(values)] for name, (steps, values) in self._columns.items()}
            return since, len(self.lines), self.generation, columns

    def version_at(self, step: int, split: str) -> int | None:
        """Return the policy's version when a step's train episodes were trained on, or its held-out ones rolled out."""
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


def _parse_line(text: bytes) -> dict[str, Any] | None:
    """Parse a line into its numbers by name; other values are dropped."""
    try:
        line = parse_json(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not isinstance(step := line.get("step"), int) or not 0 <= step < 1 << 31:
        return None
    return {k: v if is_number(v) else None for k, v in line.items() if v is None or isinstance(v, int | float)}
