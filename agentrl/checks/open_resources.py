"""What the process holds open: threads, file descriptors, child processes, asyncio tasks."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import anyio

from agentrl.inspection.finding import Finding, warn

_POOLED = ("AnyIO worker thread", "agentrl loop watch", "asyncio_", "agentrl inspection")  # kept for later use
SETTLE_S = 2.0  # for what ends by itself


def held() -> Counter[str]:
    """How many of each there are now. What a system cannot count is left out."""
    found = Counter({"thread": sum(not t.name.startswith(_POOLED) for t in threading.enumerate())})
    descriptors = Path("/proc/self/fd")
    if descriptors.is_dir():
        found["file descriptor"] = len(os.listdir(descriptors))
    found["child process"] = sum(len(_read(p).split()) for p in Path("/proc/self/task").glob("*/children"))
    with suppress(RuntimeError):  # outside of a loop
        found["asyncio task"] = len(asyncio.all_tasks())
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended meanwhile
        return ""


async def grown(since: Counter[str], least: int) -> Counter[str]:
    """What there is more of than then, by ``least`` or more, after giving it time to end."""
    more: Counter[str] = Counter()
    for _ in range(20):
        now = held()
        more = Counter({kind: n for kind in now if (n := now[kind] - since[kind]) >= least})
        if not more:
            break
        await anyio.sleep(SETTLE_S / 20)
    return more


def left_open(before: Counter[str]) -> list[Finding]:
    """Of the run as a whole, after its loop has ended."""
    if more := +(held() - before):
        said = f"after all was closed there is more open than before: {told(more)}"
        return [warn("left-open", f"{said}; close it where open_shared, or a toolset's open, ends")]
    return []


def told(more: Counter[str]) -> str:
    return ", ".join(f"{n} {kind}{'es' if kind.endswith('ss') else 's'}" for kind, n in sorted(more.items()))
