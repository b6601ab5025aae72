"""Stalls: a run in which nothing goes on is told with who waits on what, since when."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

import anyio

from agentrl.runtime.threads import open_task_group

LOOK_S = 1.0  # between two looks at whether anything goes on
MOST = 8  # things that a sentence names
PATIENCE_S = 60.0  # before a stall is told, where no setting says otherwise


class Wait(NamedTuple):
    """An episode's: on the engine, a tool, or a method of its environment. ``limit``: its deadline, in seconds."""

    what: str
    seconds: float
    limit: float | None = None

    @property
    def overdue(self) -> bool:
        """Return True unless it is within a deadline of its own, after which it ends by itself."""
        return self.limit is None or self.seconds > self.limit


class Progressing(Protocol):
    """A source of waits: a rollout, or a whole training."""

    @property
    def progress(self) -> object:
        """Return what stands still where nothing goes on: turns that ended, tokens that were sampled."""
        ...

    def waits(self) -> list[Wait]: ...


def describe_waits(waits: Iterable[Wait]) -> str:
    """Describe waits, the longest first: ``7 episodes wait on tool 'search' (oldest 94 s), 1 on the engine (2 s)``."""
    by_what: dict[str, list[float]] = {}
    for wait in waits:
        by_what.setdefault(wait.what, []).append(wait.seconds)
    if not by_what:
        return "no episode is running"
    rows = sorted(by_what.items(), key=lambda item: -max(item[1]))
    words = [f"{len(s)} on {what} ({'oldest ' * (len(s) > 1)}{max(s):.0f} s)" for what, s in rows]
    first = len(rows[0][1])
    words[0] = words[0].replace(f"{first} on", f"{first} {'episode waits' if first == 1 else 'episodes wait'} on", 1)
    if len(rows) > MOST:
        words[MOST:] = [f"{sum(len(s) for _, s in rows[MOST:])} on {len(rows) - MOST} other things"]
    return ", ".join(words)


@asynccontextmanager
async def watch_stalls(
    playing: Progressing, stall_timeout_s: float | None, tell: Callable[[str], None]
) -> AsyncIterator[None]:
    """Call ``tell`` when nothing has gone on for that long though episodes wait, and again as it lasts.

    A machine that is too busy to look, or asleep, is not a stall: a look that comes late counts as one in time.

    Args:
        stall_timeout_s: None: a minute, and not while all that is waited for is within a deadline of its own.
    """
    patience = PATIENCE_S if stall_timeout_s is None else stall_timeout_s
    pause = min(LOOK_S, patience)

    async def look() -> None:
        progress, quiet = playing.progress, 0.0
        while True:
            begun = anyio.current_time()
            await anyio.sleep(pause)
            quiet += min(anyio.current_time() - begun, 2 * pause)
            waits = playing.waits()
            if playing.progress != progress or not waits:
                progress, quiet = playing.progress, 0.0
            elif quiet >= patience and (stall_timeout_s is not None or any(w.overdue for w in waits)):
                tell(f"nothing has gone on for {patience:g} s: {describe_waits(waits)}")
                quiet = 0.0

    async with open_task_group() as tasks:
        tasks.start_soon(look)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()


def find_longest_wait(waits: Sequence[Wait]) -> float:
    return max((w.seconds for w in waits), default=0.0)
