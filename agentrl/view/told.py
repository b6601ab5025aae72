"""What a run said of itself: alarms, signs of trouble, stalls. A line of ``told.jsonl`` each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Said(NamedTuple):
    step: int
    text: str


class Told:
    """``told.jsonl``, read anew when it changes: it is short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[Said] = []
        self._read = b""

    def refresh(self) -> bool:
        """Whether anything is new, or was taken back."""
        try:
            found = self.path.read_bytes()
        except OSError:
            found = b""
        if found == self._read:
            return False
        self._read, before = found, self.said
        self.said = list(_lines(found))
        return self.said != before


def _lines(text: bytes) -> Iterator[Said]:
    """Those that can be read; the last may be half written."""
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int) and isinstance(found.get("text"), str):
            yield Said(found["step"], found["text"])
