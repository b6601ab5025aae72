"""A roll call of the learner's processes: who does not answer is named, and the others do not wait for ever.

Each process writes a number to torch's store every second, and looks at those of the others. One that stands still for
``timeout_s`` (it is stopped, its machine is gone, it hangs in a driver) is named by each of the others, which then end:
no collective that they are in would. torchrun ends the rest, and begins anew where ``--max-restarts`` says so.

Where rank 0 has the store itself (without torchrun), the store stands still or ends with it. A second thread sees that
no round of the first one ends any more, and names rank 0. torchrun's store may be silent while all processes work.

One that ends by an error says so, and is named at once; who still goes on after a minute ends: a collective over NCCL
would wait for it.

One that answers may keep the others waiting all the same. It tells where it is: where it computes for ``timeout_s``
while another one waits in a collective, that one says so. It may be right to, so nobody ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from agentrl.learner.whereabouts import IDLE, WAITS, locate_thread

BEAT_S = 1.0
FAILED_S = 60.0  # that a process has to end by itself once another one has failed: most collectives fail then
DONE, FAILED = "done", "failed"  # last words
_COMPUTES = "computes"


class RankPlace(NamedTuple):
    """The place of a process of the learner, and since how many seconds it is of that kind."""

    location: str  # "idle", "waits" in a collective, or a line of ours
    seconds: float

    @property
    def computes(self) -> bool:
        return self.location not in (IDLE, WAITS)


class SharedStore(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...
    def get(self, key: str) -> bytes: ...


def _say_to_stderr(sentence: str) -> None:
    sys.stderr.write(f"agentrl: {sentence}\n")
    sys.stderr.flush()


def _end_process(sentence: str) -> None:
    _say_to_stderr(sentence)
    os._exit(1)  # the main thread is in a collective, which hears nothing


class RollCall:
    """Answers for this process, and listens to the others, in a thread, until it is closed.

    ``worker`` is the thread that takes part in collectives; none while this process has nothing to do with the others.

    Args:
        timeout_s: how long one may be silent, from when it was first heard.
        on_silence: called with a sentence that names who is; by default the process ends.
        on_wait: called with a sentence that names whom this process waits for.
        is_store_of_first: rank 0 has the store: without one that answers it is lost.
    """

    def __init__(
        self,
        store: SharedStore,
        rank: int,
        world_size: int,
        timeout_s: float,
        on_silence: Callable[[str], None] = _end_process,
        on_wait: Callable[[str], None] = _say_to_stderr,
        beat_s: float = BEAT_S,
        *,
        is_store_of_first: bool = True,
    ) -> None:
        self._store, self._rank, self._timeout_s, self._beat_s = store, rank, timeout_s, beat_s
        self._others = [other for other in range(world_size) if other != rank]
        self._on_silence, self._on_wait, self._closed = on_silence, on_wait, threading.Event()
        self.worker: int | None = None
        self._kinds: dict[int, tuple[str, float]] = {}  # what each process does, and since when
        self._places: dict[int, str] = {}
        self._named: set[int] = set()
        self._failed: set[int] = set()
        self._heard: dict[int, tuple[bytes, float]] = {}  # what each said last, and when that was new here
        self._is_store_gone, self._round = False, time.monotonic()  # the end of the last round with the store
        self._thread = threading.Thread(target=self._run, name="agentrl roll call", daemon=True)
        self._thread.start()
        if rank and is_store_of_first:
            threading.Thread(target=self._guard, name="agentrl roll call's guard", daemon=True).start()

    def close(self, last_word: str = DONE) -> None:
        """Tell the others how this process has ended, and stop; after no last word they name it as a silent one."""
        self._closed.set()
        self._thread.join(self._beat_s * 5)
        if last_word and not (self._is_store_gone or self._thread.is_alive()):  # else it would wait for the store too
            self._say(last_word)

    def list_places(self) -> dict[int, RankPlace]:
        """List where each process is, as far as it has told."""
        now, places = time.monotonic(), self._places.copy()
        kinds = self._kinds.copy()
        return {rank: RankPlace(place, now - kinds.get(rank, ("", now))[1]) for rank, place in sorted(places.items())}

    def _run(self) -> None:
        beats, woken = 0, time.monotonic()
        while not self._closed.wait(self._beat_s):
            beats += 1
            place = locate_thread(self.worker)
            self._say(f"{beats} {place}")
            now = time.monotonic()
            if self._has_stood_still(woken, now):
                self._heard.clear()
                self._kinds.clear()
            woken = now
            if silent := self._find_silent(now):
                self._on_silence(self._describe(silent))
                return
            self._name_failed()
            if self._is_store_gone:
                return
            self._round = now
            self._look_who_waits(place, now)

    def _has_stood_still(self, woken: float, now: float) -> bool:
        """Return True where it was this process that stood still since a thread has woken."""
        return now - woken > max(10 * self._beat_s, self._timeout_s / 2)

    def _guard(self) -> None:
        """Name rank 0 where the store that it has is silent or gone; calls to one may never return."""
        woken = time.monotonic()
        while not self._closed.wait(self._beat_s):
            now = time.monotonic()
            if self._has_stood_still(woken, now):
                self._round = now
            woken = now
            if now - self._round > self._timeout_s:
                self._on_silence(self._describe([0]))
                return

    def _look_who_waits(self, place: str, now: float) -> None:
        """Say whom this process has waited for, if one computes since then."""
        self._note(self._rank, place, now)
        for other, (word, _) in self._heard.items():
            where = word.decode().partition(" ")[2] or IDLE
            self._note(other, where, now)
            waits = min(now - self._kinds[r][1] for r in (self._rank, other))
            apart = self._kinds[self._rank][0] == WAITS and self._kinds[other][0] == _COMPUTES
            if apart and waits > self._timeout_s and other not in self._named:
                self._named.add(other)
                self._on_wait(
                    f"rank {self._rank} of the learner's processes has waited for rank {other} for {waits:.0f} s, "
                    f"which is at {where}; it goes on waiting, and a signal ends the run"
                )

    def _note(self, rank: int, place: str, now: float) -> None:
        kind = place if place in (WAITS, IDLE) else _COMPUTES
        self._places[rank] = place
        if self._kinds.get(rank, ("", now))[0] != kind:
            self._kinds[rank] = kind, now
            self._named.discard(rank)

    def _say(self, word: str) -> None:
        try:
            self._store.set(f"agentrl/alive/{self._rank}", word)
        except RuntimeError:  # torchrun ends everybody; where the store was rank 0's, the guard does
            self._is_store_gone = True

    def _find_silent(self, now: float) -> list[int]:
        silent = []
        for other in self._others:
            word = self._listen(other)
            before, since = self._heard.get(other, (b"", now))
            if word != before or other not in self._heard:
                self._heard[other] = (word, now)
            elif word not in (b"", DONE.encode()) and now - since > self._find_patience(word):
                silent.append(other)
        return silent

    def _find_patience(self, word: bytes) -> float:
        """Return how many seconds a word may stand."""
        return min(FAILED_S, self._timeout_s) if word == FAILED.encode() else self._timeout_s

    def _name_failed(self) -> None:
        """Say, once, who has ended by an error."""
        for other, (word, _) in self._heard.items():
            if word == FAILED.encode() and other not in self._failed:
                self._failed.add(other)
                self._on_wait(f"rank {other} of the learner's processes has ended by an error, which it tells")

    def _listen(self, other: int) -> bytes:
        key = f"agentrl/alive/{other}"
        try:
            return self._store.get(key) if self._store.check([key]) else b""
        except RuntimeError:
            self._is_store_gone = True
            return DONE.encode()

    def _describe(self, silent: list[int]) -> str:
        names = " and ".join(f"rank {other}" for other in silent)
        why = f"did not answer for {self._timeout_s:g} s (learner.rank_timeout_s), and the others wait for it"
        if self._failed.issuperset(silent):
            why = "ended by an error, and this process waits for it"
        return (
            f"{names} of the learner's processes {why}; rank {self._rank} ends. What is saved is in the "
            "run's checkpoints: agentrl train --resume RUN, or torchrun --max-restarts N begins there by itself"
        )
