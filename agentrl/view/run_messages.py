"""The messages that a run wrote about itself: signs of trouble, stalls. A line of ``events.jsonl`` each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from agentrl.settings.documents import parse_json

_MOST_BYTES = 16 << 20  # of the file, that are read


class RunMessage(NamedTuple):
    """A sentence, the step it was written at, and whether it is about players or servers that come and go."""

    step: int
    text: str
    about: str = ""


class RunMessages:
    """The messages in ``events.jsonl``, read anew when it changes: it is short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[RunMessage] = []
        self._content = b""

    def refresh(self) -> bool:
        """Read the file. Return True if messages were added or removed."""
        try:
            with self.path.open("rb") as file:
                content = file.read(_MOST_BYTES)
        except OSError:
            content = b""
        if content == self._content:
            return False
        self._content, before = content, self.all
        self.all = list(_parse_lines(content))
        return self.all != before


def _parse_lines(content: bytes) -> Iterator[RunMessage]:
    """Yield the messages that can be read; the last line may be half written."""
    for text in content.splitlines():
        try:
            line = parse_json(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("text"), str):
            yield RunMessage(line["step"], line["text"], str(line.get("about", "")))
