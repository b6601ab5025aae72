"""Rows of a stream by their number: read once, in order, by a thread that stays a few ahead of what is asked for."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import partial
from itertools import count, islice

from agentrl import InfraError, UserError
from agentrl.runtime.threads import run_in_thread
from agentrl_envs.dataset import Reader, Row

AHEAD = 256  # rows that are read before they are asked for
CLOSE_S = 2.0
KEPT = 4096  # rows that are kept, of the newest; what is older is read anew


class RowStream:
    """The rows of a stream, over and over: where it ends, the next epoch begins. Row ``k`` is always the same.

    Args:
        read: begins to read the stream.
        buffer: rows that are shuffled among each other, as ``IterableDataset.shuffle`` does; 0: the stream's order.
        seed: of the shuffling; each epoch has an order of its own.
    """

    def __init__(self, read: Reader, buffer: int = 0, seed: int = 0) -> None:
        self.read, self.buffer, self.seed = read, buffer, seed
        self._changed = threading.Condition()
        self._source = threading.Lock()  # IterableDatasets keep a state, which two who read at once would mix up
        self._thread: threading.Thread | None = None
        self._rows: dict[int, Row] = {}
        self._next = 0  # number of the row that is read next
        self._wanted = -1
        self._reading = False
        self._closed = False
        self._error: Exception | None = None

    async def row(self, number: int) -> Row:
        """Return a row, once it has been read.

        Raises:
            UserError: a row is no row, or there is none.
            InfraError: ``stream``: reading failed; the next one who asks tries again.
        """
        with self._changed:
            row = self._rows.get(number)
            if row is not None:
                self._want(number)
                return row
        return await run_in_thread(lambda: self._wait_for(number))

    async def close(self) -> None:
        """End the thread, and whoever waits; a thread that is held up in reading is left behind."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            await run_in_thread(partial(self._thread.join, CLOSE_S))

    def _want(self, number: int) -> None:
        self._wanted = max(self._wanted, number)
        if not self._reading and not self._closed:
            self._reading, self._error = True, None
            self._thread = threading.Thread(target=self._read_on, name="agentrl stream", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _wait_for(self, number: int) -> Row:
        with self._changed:
            if number >= self._next - KEPT:  # it is kept, or is still to come
                self._want(number)
                self._changed.wait_for(lambda: number < self._next or self._error is not None or self._closed)
                if number in self._rows:
                    return self._rows[number]
                raise self._error or InfraError("stream", "the dataset is closed")
        with self._source:  # an old one, of a task that is played again
            return next(islice(self._epochs(), number, None))

    def _read_on(self) -> None:
        """Read on from where reading had come to, in the thread."""
        rows = islice(self._epochs(), self._next, None)
        try:
            while self._may_read():
                with self._source:
                    row = next(rows)
                self._keep(row)
        except Exception as error:
            known = isinstance(error, UserError)
            fault = error if known else InfraError("stream", f"the dataset cannot be read: {error!r:.300}")
            with self._changed:
                self._error = fault
        finally:
            with self._changed:
                self._reading = False
                self._changed.notify_all()

    def _may_read(self) -> bool:
        """Wait until another row is wanted. Return False once the stream is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next <= self._wanted + AHEAD)
            return not self._closed

    def _keep(self, row: Row) -> None:
        with self._changed:
            self._rows[self._next] = row
            self._rows.pop(self._next - KEPT, None)
            self._next += 1
            self._changed.notify_all()

    def _epochs(self) -> Iterator[Row]:
        for epoch in count():
            empty = True
            for row in self._shuffle(self.read(), random.Random(f"{self.seed}:{epoch}")):
                empty = False
                yield row
            if empty:
                raise UserError("the stream of env.data has no rows to train on")

    def _shuffle(self, rows: Iterator[Row], rng: random.Random) -> Iterator[Row]:
        waiting = list(islice(rows, self.buffer))
        for row in rows:
            if not waiting:
                yield row
                continue
            place = rng.randrange(len(waiting))
            yield waiting[place]
            waiting[place] = row
        rng.shuffle(waiting)
        yield from waiting
