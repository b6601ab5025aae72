"""The timelines of a run's steps: a line of ``timeline.jsonl`` each, read when it is asked for."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.settings.documents import parse_json

_HEAD = re.compile(rb'\{"step": (\d+), "kind": "(step|evaluation|save)", ')
_MOST_BYTES = 128 << 20  # of the file, that are looked through at once
ORDER = (
    *("evaluate", "generate", "agent", "tools", "tool/", "env", "reward", "render", "learn", "sync", "write"),
    "checkpoint",
)


class _Line(NamedTuple):
    """The place of a line in the file, in bytes."""

    begin: int
    end: int
    head: bytes


class Timelines:
    """The pictures in the file, which grows while a run goes on, and is cut when one resumes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[tuple[int, str], _Line] = {}
        self._read = 0
        self._last: _Line | None = None
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Find the new lines; all if some were removed."""
        with self._lock:
            try:
                with self.path.open("rb") as file:
                    size = file.seek(0, 2)
                    if size < self._read or not self._continues(file):
                        self._lines, self._read, self._last = {}, 0, None
                    file.seek(self._read)
                    new = file.read(_MOST_BYTES)
            except OSError:
                self._lines, self._read, self._last = {}, 0, None
                return
            whole = new[: new.rfind(b"\n") + 1]
            at = self._read
            for line in whole.splitlines(keepends=True):
                if match := _HEAD.match(line):
                    self._last = _Line(at, at + len(line), line[:80])
                    self._lines[int(match[1]), match[2].decode()] = self._last
                at += len(line)
            self._read = at

    def _continues(self, file: Any) -> bool:
        if self._last is None:
            return True
        file.seek(self._last.begin)
        head: bytes = file.read(len(self._last.head))
        return head == self._last.head

    def steps(self) -> list[int]:
        """List the steps that have a picture."""
        return sorted({step for step, _ in self._lines})

    def pictures(self, step: int) -> list[dict[str, Any]]:
        """Return a step's pictures: of the step, and of the evaluation and the checkpoint after it, with sorted lanes.

        Each has `kind`, `begin` (seconds since the run's start), `seconds`, `lanes` as [name, seconds, intervals] and
        `waited` as [begin, end, owner]. A line that cannot be read is left out.
        """
        pictures = []
        for kind in ("step", "evaluation", "save"):
            line = self._lines.get((step, kind))
            picture = self._read_line(line) if line is not None else None
            if picture is not None:
                pictures.append({"kind": kind, **picture})
        return pictures

    def _read_line(self, line: _Line) -> dict[str, Any] | None:
        try:
            with self.path.open("rb") as file:
                file.seek(line.begin)
                raw = parse_json(file.read(line.end - line.begin))
            lanes = {str(name): _pairs(intervals) for name, intervals in raw["lanes"].items()}
            busy = {str(name): float(seconds) for name, seconds in raw["busy"].items()}
            return {
                "begin": float(raw["begin"]),
                "seconds": float(raw["seconds"]),
                "lanes": [[name, busy[name], lanes[name]] for name in _sort_lanes(lanes)],
                "waited": [[float(a), float(b), str(owner)] for a, b, owner in raw["waited"]],
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None


def _pairs(intervals: Any) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in intervals]


def _sort_lanes(lanes: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Return the names of lanes that are not empty, in the order of a step; others follow, idle is last."""

    def rank(name: str) -> tuple[int, str]:
        kind = "tool/" if name.startswith("tool/") else name
        return (ORDER.index(kind) if kind in ORDER else len(ORDER) + (name == "idle"), name)

    return sorted((name for name in lanes if lanes[name]), key=rank)
