"""Whoever watches a run: is told what happens, and may end it."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from agentrl.aside import together
from agentrl.types import Trajectory
from agentrl.waits import Playing, oldest, told

if TYPE_CHECKING:
    from agentrl.measurement import Evaluation
    from agentrl.run import Run
    from agentrl.session import Session


class Watcher:
    """Is told what happens, and does nothing: the command line's live table is one that does."""

    def started(self, session: Session, run: Run) -> None: ...
    def phase(self, name: str, episodes: int) -> None: ...
    def episode(self, trajectory: Trajectory) -> None: ...
    def measured(self, step: int, found: Evaluation) -> None: ...
    def step(self, step: int, values: Mapping[str, float]) -> None: ...
    def interrupted(self, by: str) -> None: ...
    def said(self, text: str) -> None: ...
    def waiting(self, text: str) -> None: ...


@asynccontextmanager
async def told_on_signal(playing: Playing, watcher: Watcher) -> AsyncIterator[None]:
    """On SIGUSR1 it is said who waits on what; now and then the watcher is told so too."""

    async def listen() -> None:
        with anyio.open_signal_receiver(signal.SIGUSR1) as signals:
            async for _ in signals:
                watcher.said(told(playing.waits()))

    async def tell() -> None:
        while True:
            await anyio.sleep(1.0)
            waits = playing.waits()
            watcher.waiting(told(waits) if oldest(waits) > 2.0 else "")

    async with together() as tasks:
        if hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread():
            tasks.start_soon(listen)
        tasks.start_soon(tell)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()
