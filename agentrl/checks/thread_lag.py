"""The lag of a thread of this process. On a busy machine everything is late, whoever is to blame."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

NAP_S = 0.02


class _ThreadLag:
    """The worst lag of all naps while it was measured."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._over = threading.Event()

    def measure(self) -> None:
        """Nap until it is over; runs in a thread."""
        started = perf_counter()
        while not self._over.wait(NAP_S):
            now = perf_counter()
            self.worst_s, started = max(self.worst_s, now - started - NAP_S), now


@contextmanager
def measure_thread_lag() -> Iterator[_ThreadLag]:
    """Measure the lag of a thread while the block runs."""
    lag = _ThreadLag()
    thread = threading.Thread(target=lag.measure, name="agentrl inspection naps", daemon=True)
    thread.start()
    try:
        yield lag
    finally:
        lag._over.set()
        thread.join()
