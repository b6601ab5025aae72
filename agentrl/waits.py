"""Who waits on what, since when: the words for a run that seems to hang."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

import anyio

from agentrl.aside import together

LOOK_S = 1.0  # between two looks at whether anything goes on


class Wait(NamedTuple):
    """An episode's: on the engine, a tool, or a method of its environment."""

    what: str
    seconds: float


class Playing(Protocol):
    """Where episodes are played."""

    @property
    def turns(self) -> int:
        """That have ended, of all episodes: it stands still where nothing goes on."""
        ...

    def waits(self) -> list[Wait]: ...


def told(waits: Iterable[Wait]) -> str:
    """``7 episodes wait on tool 'search' (oldest 94 s), 1 on the engine (2 s)``; the oldest first."""
    by_what: dict[str, list[float]] = {}
    for wait in waits:
        by_what.setdefault(wait.what, []).append(wait.seconds)
    if not by_what:
        return "no episode is being played"
    rows = sorted(by_what.items(), key=lambda item: -max(item[1]))
    words = [f"{len(s)} on {what} ({'oldest ' * (len(s) > 1)}{max(s):.0f} s)" for what, s in rows]
    first = len(rows[0][1])
    words[0] = words[0].replace(f"{first} on", f"{first} {'episode waits' if first == 1 else 'episodes wait'} on", 1)
    return ", ".join(words)


@asynccontextmanager
async def stalls_told(playing: Playing, stall_s: float, tell: Callable[[str], None]) -> AsyncIterator[None]:
    """Inside, ``tell`` is called when for that long no turn has ended though episodes wait, and again as it lasts."""

    async def look() -> None:
        turns, since = playing.turns, anyio.current_time()
        while True:
            await anyio.sleep(min(LOOK_S, stall_s))
            now = anyio.current_time()
            waits = playing.waits()
            if playing.turns != turns or not waits:
                turns, since = playing.turns, now
            elif now - since >= stall_s:
                tell(f"nothing has gone on for {stall_s:g} s: {told(waits)}")
                since = now

    async with together() as tasks:
        tasks.start_soon(look)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()


def oldest(waits: Sequence[Wait]) -> float:
    return max((w.seconds for w in waits), default=0.0)
