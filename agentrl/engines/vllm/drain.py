"""Updates that find no request running: those that run are finished, new ones wait.

vLLM's own pause that waits for running requests refuses new ones meanwhile from 0.33 on; 0.32 keeps them waiting.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio


class Drain:
    """The door of one engine, through which its requests and its updates go."""

    def __init__(self) -> None:
        self._door, self._running, self._idle = anyio.Lock(), 0, anyio.Event()

    @property
    def running(self) -> int:
        """Return how many requests run."""
        return self._running

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Run a request in this block, once no update holds it back."""
        async with self._door:
            self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def finish_requests(self, wanted: bool) -> AsyncIterator[None]:
        """Enter this block when the running requests have ended, and hold new ones back until it ends, if wanted."""
        if not wanted:
            yield
            return
        async with self._door:
            self._idle = anyio.Event()
            if self._running:
                await self._idle.wait()
            yield
