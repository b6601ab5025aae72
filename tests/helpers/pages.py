"""The pages of the documentation, taken apart: fences, commands, links, headings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks/README.md",
    ROOT / "tools/agentrl_tools/sandbox/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
_FENCE = re.compile(
    r"(?:<!-- test:\s(?P<note>(?:(?!-->).)*?)\s-->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.S | re.M
)
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Fence:
    """A block of code. ``note`` is in a comment before it, which readers do not see:

    ``file NAME``: the block is that file; ``skip REASON``: it is not run; anything else: what is run before it.
    """

    page: str
    line: int  # of its first line of code
    language: str
    text: str
    note: str

    @property
    def file(self) -> str | None:
        return self.note.removeprefix("file ") if self.note.startswith("file ") else None

    @property
    def skipped(self) -> str | None:
        return self.note.removeprefix("skip ") if self.note.startswith("skip ") else None

    @property
    def before(self) -> str:
        return "" if self.file or self.skipped else self.note


class Command(NamedTuple):
    """A line of a shell, as words; ``variables`` stand before it."""

    page: str
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


@cache
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def fences(page: Path) -> Iterator[Fence]:
    found = text(page)
    for m in _FENCE.finditer(found):
        line = found.count("\n", 0, m.start("text")) + 1
        yield Fence(name(page), line, m["language"], m["text"], m["note"] or "")


def commands(fence: Fence) -> Iterator[Command]:
    """Its lines, joined where they go on, without comments."""
    line, rest = fence.line, ""
    for written in fence.text.splitlines():
        if written.endswith("\\"):
            rest += written[:-1]
            line += 1
            continue
        words = tuple(shlex.split(rest + written, comments=True))
        if words:
            yield Command(fence.page, line, words)
        line, rest = line + 1, ""


def every_fence(language: str) -> list[Fence]:
    return [f for page in PAGES for f in fences(page) if f.language == language]


def every_command() -> list[Command]:
    return [c for f in every_fence("bash") for c in commands(f)]


def links(page: Path) -> list[str]:
    return _LINK.findall(_FENCE.sub("", text(page)))


@cache
def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.+)$", _FENCE.sub("", text(page)), re.M)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in heads}


def rows(page: Path, first: str) -> list[list[str]]:
    """Of the table whose head begins so: its cells."""
    lines = text(page).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return found
