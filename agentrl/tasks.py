"""Which tasks come next. A task is an integer, so the data cursor of a run is one number."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass
class TaskSampler:
    """Draws tasks in order.

    With a finite ``count`` (a dataset) each epoch is a permutation of its rows, its order fixed by ``seed`` and the
    epoch. Without one (a generator) run ``seed`` owns the integers from ``seed * 2**32`` on.
    """

    count: int | None
    seed: int
    cursor: int = 0

    def take(self, n: int) -> list[int]:
        """The next ``n`` tasks; moves the cursor."""
        tasks = [self._at(i) for i in range(self.cursor, self.cursor + n)]
        self.cursor += n
        return tasks

    def _at(self, index: int) -> int:
        if self.count is None:
            return self.seed * 2**32 + index
        epoch, row = divmod(index, self.count)
        return self._permutation(epoch)[row]

    def _permutation(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            self._rows = list(range(self.count or 0))
            random.Random(f"{self.seed}:{epoch}").shuffle(self._rows)
            self._epoch = epoch
        return self._rows

    def __post_init__(self) -> None:
        self._epoch = -1
        self._rows: list[int] = []
