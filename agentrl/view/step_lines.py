"""The lines of a log that has one a step, and one an evaluation: found as the file grows, read when asked for."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.settings.documents import parse_json

_HEAD = re.compile(rb'\{"step": (\d+), "kind": "(step|evaluation|save)", ')
_MOST_BYTES = 128 << 20  # of the file, that are looked through at once


class _Line(NamedTuple):
    """The place of a line in the file, in bytes."""

    begin: int
    end: int
    head: bytes


class StepLines:
    """The lines of a file that grows while a run goes on, and is cut when one resumes."""

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
        """List the steps that have a line."""
        return sorted({step for step, _ in list(self._lines)})

    def read(self, step: int, kind: str) -> Any:
        """Return what a line holds; None where there is no such line, or none that can be read."""
        line = self._lines.get((step, kind))
        if line is None:
            return None
        try:
            with self.path.open("rb") as file:
                file.seek(line.begin)
                return parse_json(file.read(line.end - line.begin))
        except (OSError, ValueError):
            return None
