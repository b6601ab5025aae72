"""A wish to end early: Ctrl-C, SIGTERM (Slurm, Kubernetes, timeout), SIGHUP (a closed terminal), a kernel's interrupt.

The first one lets a run finish what it is at, save, and return; the second ends it at once. Signals are handled in the
main thread whatever loop runs there, so a notebook's cell hears them too.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, TypeVar

import anyio

from agentrl.errors import Interrupted

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class Interruption:
    """The signals that a run has heard. ``event`` is set by the first one after ``begun``.

    Args:
        tell: is called in the run's loop with the name of the first signal.
    """

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self.tell, self.event = tell, anyio.Event()
        self.signal: signal.Signals | None = None
        self.begun = False  # before that there is nothing to save, and the first signal ends the run
        self._leaving = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scope: anyio.CancelScope | None = None

    @property
    def is_set(self) -> bool:
        return self.event.is_set()

    @contextmanager
    def install_handlers(self) -> Iterator[None]:
        """Handle signals until the block ends, if this is the main thread. A program's own handlers stay."""
        before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            before = {s: signal.getsignal(s) for s in SIGNALS if _is_free(s)}
        for number in before:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @asynccontextmanager
    async def cancel_on_signal(self) -> AsyncIterator[None]:
        """Run the block until it ends, or a second signal cancels it.

        Raises:
            Interrupted: it was cancelled.
        """
        self._loop = asyncio.get_running_loop()
        with anyio.CancelScope() as self._scope:
            yield
        if self._leaving and self._scope.cancelled_caught:
            raise Interrupted(self.signal or signal.SIGINT)

    async def run_unless_set(self, work: Awaitable[T]) -> T | None:
        """Return the result of ``work``; None if the run is to end, which cancels it."""
        with anyio.CancelScope() as scope:
            watch = asyncio.create_task(self._cancel(scope))
            try:
                return await work
            finally:
                watch.cancel()
        return None

    def receive(self, number: int) -> None:
        """Note a signal, in the loop's thread."""
        again, self.signal = self.is_set or not self.begun, signal.Signals(number)
        if again:
            self._leaving = True
            assert self._scope is not None
            self._scope.cancel()
            return
        self.event.set()
        self.tell(WORDS[self.signal])

    async def _cancel(self, scope: anyio.CancelScope) -> None:
        await self.event.wait()
        scope.cancel()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._loop is None or self._leaving or (not self.begun and self.signal):
            raise Interrupted(signal.Signals(number))  # no loop runs yet, or none that still listens
        if not self.begun:
            self.signal = signal.Signals(number)
        self._loop.call_soon_threadsafe(self.receive, number)


@contextmanager
def raise_signals_as_interrupts() -> Iterator[list[signal.Signals]]:
    """Make SIGTERM and SIGHUP do what Ctrl-C does, whatever handles that. Yields those that came."""
    came: list[signal.Signals] = []

    def forward(number: int, _: FrameType | None) -> None:
        came.append(signal.Signals(number))
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background
            raise Interrupted(came[-1])
        signal.raise_signal(signal.SIGINT)

    forward.is_agentrl = True  # type: ignore[attr-defined]
    main = threading.current_thread() is threading.main_thread()
    mine = [s for s in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(s) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, forward)
    try:
        yield came
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def ignore_signals() -> None:
    """Leave it to another process to end this one."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _is_free(number: signal.Signals) -> bool:
    """Return False for SIGTERM and SIGHUP that the program handles itself, or ignores, as under nohup.

    Ray's handler, which ``ray.init`` leaves behind and which only ends the process, is not the program's own.
    """
    handler = signal.getsignal(number)
    if number == signal.SIGINT or handler is signal.SIG_DFL or hasattr(handler, "is_agentrl"):
        return True
    return str(getattr(handler, "__module__", "")).startswith("ray.")
