"""The resources that the process holds open: threads, file descriptors, child processes, asyncio tasks."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import anyio

from agentrl.checks.finding import Finding, warn

_POOLED = ("AnyIO worker thread", "agentrl loop watch", "asyncio_", "agentrl inspection")  # kept for later use
SETTLE_S = 2.0  # for what ends by itself


def count_open() -> Counter[str]:
    """Count the open resources of each kind. A kind that the system cannot count is left out."""
    counts = Counter({"thread": sum(not t.name.startswith(_POOLED) for t in threading.enumerate())})
    descriptors = Path("/proc/self/fd")
    if descriptors.is_dir():
        counts["file descriptor"] = len(os.listdir(descriptors))
    counts["child process"] = sum(len(_read(p).split()) for p in Path("/proc/self/task").glob("*/children"))
    with suppress(RuntimeError):  # outside of a loop
        counts["asyncio task"] = len(asyncio.all_tasks())
    return counts


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended meanwhile
        return ""


async def find_growth(before: Counter[str], least: int) -> Counter[str]:
    """Return the kinds that grew by ``least`` or more since ``before``, after giving them time to end."""
    more: Counter[str] = Counter()
    for _ in range(20):
        now = count_open()
        more = Counter({kind: n for kind in now if (n := now[kind] - before[kind]) >= least})
        if not more:
            break
        await anyio.sleep(SETTLE_S / 20)
    return more


def check_leftovers(before: Counter[str]) -> list[Finding]:
    """Return a finding if the checks as a whole left something open, after their loop has ended."""
    if more := +(count_open() - before):
        sentence = f"after all was closed there is more open than before: {describe_counts(more)}"
        return [warn("left-open", f"{sentence}; close it where open_shared, or a toolset's open, ends")]
    return []


def describe_counts(more: Counter[str]) -> str:
    """Format counts: ``2 file descriptors, 1 thread``."""
    return ", ".join(f"{n} {kind}{'es' if kind.endswith('ss') else 's'}" for kind, n in sorted(more.items()))
