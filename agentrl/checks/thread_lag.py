"""How late does a thread of this process wake up? On a busy machine everything is late, whoever is to blame."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

NAP_S = 0.02


class Lateness:
    """``worst_s``: of all naps while it was measured."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._over = threading.Event()

    def measure(self) -> None:
        """In a thread."""
        begun = perf_counter()
        while not self._over.wait(NAP_S):
            now = perf_counter()
            self.worst_s, begun = max(self.worst_s, now - begun - NAP_S), now


@contextmanager
def measured() -> Iterator[Lateness]:
    """Inside, naps are taken."""
    lateness = Lateness()
    thread = threading.Thread(target=lateness.measure, name="agentrl inspection naps", daemon=True)
    thread.start()
    try:
        yield lateness
    finally:
        lateness._over.set()
        thread.join()
