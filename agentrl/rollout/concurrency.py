"""The number of episodes in play at once: as many as keep the engine full while the others wait for their tools.

Of an episode's time a share is spent with the engine. Where that is a third, three times the engine's capacity have to
be in play for it to be full. More would wait in the engine's queue, while what it has kept of them is thrown out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import ceil

import anyio

SLACK = 1.25  # episodes begin and end unevenly
MEMORY = 0.99  # weight of what was known of an episode's time, when a turn has ended


@dataclass
class ConcurrencyLimiter:
    """Gives slots to episodes, first come, first served."""

    capacity: int  # of the engine
    running: int = 0
    _engine_s: float = 0.0  # of a turn, weighted means
    _other_s: float = 0.0
    _waiting: deque[anyio.Event] = field(default_factory=deque)

    @property
    def limit(self) -> int:
        """Return how many episodes may run at once now."""
        share = 1.0 + (self._other_s / self._engine_s if self._engine_s else 0.0)
        return ceil(self.capacity * share * SLACK)

    @property
    def queued(self) -> int:
        """Return how many episodes wait for a slot."""
        return len(self._waiting)

    def record_turn(self, engine_s: float, other_s: float, count: int = 1) -> None:
        """Record one turn's engine and environment time, or those of several alike; update the limit."""
        weight = MEMORY**count if self._engine_s else 0.0
        self._engine_s = weight * self._engine_s + (1 - weight) * engine_s
        self._other_s = weight * self._other_s + (1 - weight) * other_s
        self._wake_waiting()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a free slot and hold it while an episode runs."""
        if self.running >= self.limit or self._waiting:
            await self._queue()
        else:
            self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._wake_waiting()

    async def _queue(self) -> None:
        turn = anyio.Event()
        self._waiting.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():  # given a slot and cancelled at the same moment
                self.running -= 1
                self._wake_waiting()
            else:
                self._waiting.remove(turn)
            raise

    def _wake_waiting(self) -> None:
        while self._waiting and self.running < self.limit:
            self.running += 1
            self._waiting.popleft().set()
