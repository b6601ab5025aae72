"""Lanes of a run: who was busy from when to when, as intervals that were measured.

    generate   |======|   |===========|          |====|      a lane is the union of its owner's intervals
    tool/price     |====|     |===|                          lanes overlap: that is what playing without barriers gains
    learn                               |======|
    idle                             |==|                    nobody was busy

A lane costs two calls a stretch, each below a microsecond, however many episodes are in it: it counts who is inside,
and notes when the first comes and the last leaves. Seconds are sums of measured intervals, never differences of sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Interval = tuple[float, float]  # begin, end
Piece = tuple[float, float, str]  # begin, end, owner

IDLE = "idle"
KEPT = 1024  # intervals of a lane that are held while they are recorded, before the narrowest gaps are closed
TOLD = 512  # times that another process tells of a lane, before these are united
TRACKS = 4096  # episodes that ended and are held until the next cut


def merge_intervals(intervals: Sequence[Interval], most: int) -> list[Interval]:
    """Join neighbours across the narrowest gaps until `most` intervals are left. They are sorted and apart."""
    if len(intervals) <= most:
        return list(intervals)
    gaps = [b[0] - a[1] for a, b in pairwise(intervals)]
    widest = sorted(range(len(gaps)), key=gaps.__getitem__, reverse=True)[: most - 1]
    edges = [-1, *sorted(widest), len(gaps)]
    return [(intervals[a + 1][0], intervals[b][1]) for a, b in pairwise(edges)]


def unite_intervals(intervals: ArrayLike, begin: float, end: float) -> list[Interval]:
    """Return the union of intervals between two moments, sorted and apart."""
    import numpy as np

    found = np.asarray(intervals, dtype=np.float64).reshape(-1, 2).clip(begin, end)
    found = found[found[:, 0] < found[:, 1]]
    if not len(found):
        return []
    begins, ends = found[np.argsort(found[:, 0])].T
    ends = np.maximum.accumulate(ends)
    apart = np.flatnonzero(begins[1:] > ends[:-1])  # where a gap is before the next one
    return list(zip(begins[[0, *apart + 1]].tolist(), ends[[*apart, -1]].tolist(), strict=True))


def _join(parts: Sequence[ArrayLike]) -> ArrayLike:
    """Join arrays of intervals to one."""
    import numpy as np

    return np.concatenate([np.asarray(part, dtype=np.float64).reshape(-1, 2) for part in parts])


class _Lane:
    """One owner's intervals since the last cut, and who is inside now."""

    __slots__ = ("inside", "intervals", "seconds", "since")

    def __init__(self) -> None:
        self.inside, self.since, self.seconds = 0, 0.0, 0.0
        self.intervals: list[Interval] = []

    def close(self, now: float) -> None:
        self.seconds += now - self.since
        self.intervals.append((self.since, now))
        if len(self.intervals) > 2 * KEPT:
            self.intervals = merge_intervals(self.intervals, KEPT)

    def cut(self, now: float) -> tuple[float, list[Interval]]:
        if self.inside:
            self.close(now)
            self.since = now
        found = self.seconds, self.intervals
        self.seconds, self.intervals = 0.0, []
        return found


@dataclass(frozen=True)
class Stretch:
    """All lanes between two moments; `seconds` are exact, `intervals` are at most `2 * KEPT` a lane."""

    begin: float
    end: float
    seconds: dict[str, float]
    intervals: dict[str, list[Interval]]
    tracks: Sequence[Track] = ()  # of the episodes that ended in it

    @property
    def wall(self) -> float:
        return self.end - self.begin


class Lanes:
    """Record intervals by owner, from one thread. `clock` gives seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.clock = clock
        self.begun = clock()
        self._lanes: dict[str, _Lane] = {}
        self._busy = 0  # over all owners
        self._idle = _Lane()
        self._idle.inside, self._idle.since = 1, self.begun
        self._tracks: deque[Track] = deque(maxlen=TRACKS)
        self._elsewhere: dict[str, list[ArrayLike]] = {}  # as they were told

    def begin(self, owner: str, now: float) -> None:
        """Enter a lane at the moment `now`."""
        lane = self._lanes.get(owner)
        if lane is None:
            lane = self._lanes[owner] = _Lane()
        if lane.inside:
            lane.inside += 1
        else:
            lane.inside, lane.since = 1, now
        if self._busy:
            self._busy += 1
        else:
            self._busy, self._idle.inside = 1, 0
            self._idle.close(now)

    def end(self, owner: str, now: float) -> None:
        """Leave a lane that was entered."""
        lane = self._lanes[owner]
        lane.inside -= 1
        if not lane.inside:
            lane.close(now)
        self._busy -= 1
        if not self._busy:
            self._idle.inside, self._idle.since = 1, now

    @contextmanager
    def busy(self, owner: str) -> Iterator[None]:
        """Hold a lane while the block runs."""
        self.begin(owner, self.clock())
        try:
            yield
        finally:
            self.end(owner, self.clock())

    def ended(self, track: Track) -> None:
        """Keep the track of an episode that ended until the next cut."""
        track.end = self.clock()
        self._tracks.append(track)

    def include(self, owner: str, intervals: ArrayLike) -> None:
        """Add what another process recorded, in seconds of this clock, but for what came before the last cut."""
        told = self._elsewhere.setdefault(owner, [])
        told.append(intervals)
        if len(told) > TOLD:
            told[:] = [merge_intervals(unite_intervals(_join(told), self.begun, self.clock()), 8 * KEPT)]

    def include_track(self, track: Track) -> None:
        """Keep the track of an episode that ended in another process until the next cut."""
        self._tracks.append(track)

    def cut(self) -> Stretch:
        """Return everything since the last cut. Intervals that are open go on in the next stretch."""
        now, begun = self.clock(), self.begun
        found = {owner: lane.cut(now) for owner, lane in self._lanes.items()}
        found[IDLE] = self._idle.cut(now)
        if self._elsewhere:
            found = self._unite(found, begun, now)
        self._lanes = {owner: lane for owner, lane in self._lanes.items() if lane.inside}
        tracks, self.begun = list(self._tracks), now
        self._tracks.clear()
        named = {owner: own for owner, own in found.items() if own[1] or owner == IDLE}
        return Stretch(
            begun, now, {o: s for o, (s, _) in named.items()}, {o: list(i) for o, (_, i) in named.items()}, tracks
        )

    def _unite(
        self, found: dict[str, tuple[float, list[Interval]]], begin: float, end: float
    ) -> dict[str, tuple[float, list[Interval]]]:
        """Return each lane with what other processes recorded, and as idle when nobody was busy anywhere."""
        elsewhere, self._elsewhere = self._elsewhere, {}
        for owner, told in elsewhere.items():
            united = unite_intervals(_join([found.get(owner, (0.0, []))[1], *told]), begin, end)
            found[owner] = sum(b - a for a, b in united), merge_intervals(united, 2 * KEPT)
        busy = unite_intervals([i for owner, (_, own) in found.items() if owner != IDLE for i in own], begin, end)
        edges = [begin, *(moment for interval in busy for moment in interval), end]
        idle = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
        found[IDLE] = sum(b - a for a, b in idle), merge_intervals(idle, 2 * KEPT)
        return found


# An episode's stages, and whose lane each is.
OWNERS = {
    "generate": "generate",
    "reset": "env",
    "tools": "env",  # a step; the tools that it calls have lanes of their own
    "clone": "env",
    "close": "env",
    "score": "reward",
    "render": "render",
    "agent": "agent",  # of somebody else, between an answer and its next request
}


@dataclass(slots=True, eq=False)
class Track:
    """An episode's way through the lanes: at one thing at a time, each until the next."""

    lanes: Lanes
    path: list[tuple[float, str]] = field(default_factory=list)  # since when, at what
    end: float = 0.0
    owner: str = ""  # of the stage that it is in
    calls: int = 0  # tools that run
    _first: int = 0  # where in the path they began

    def enter(self, stage: str, now: float) -> None:
        self.owner = owner = OWNERS.get(stage, "env")
        self.path.append((now, owner))
        if not self.calls:
            self.lanes.begin(owner, now)

    def leave(self, now: float) -> None:
        if not self.calls:  # else it left when the first of them began
            self.lanes.end(self.owner, now)
        self.owner = ""

    def call(self, tool: str) -> None:
        """Note that a tool begins: while one runs the environment does not."""
        now, lane = self.lanes.clock(), f"tool/{tool}"
        self.lanes.begin("tools", now)
        self.lanes.begin(lane, now)
        if not self.calls:
            self._first = len(self.path)
            self.path.append((now, lane))
            if self.owner:
                self.lanes.end(self.owner, now)
        self.calls += 1

    def returned(self, tool: str) -> None:
        """Note that a tool returned. Of tools that run together the episode waits for the last."""
        now, lane = self.lanes.clock(), f"tool/{tool}"
        self.calls -= 1
        if not self.calls:
            self.path[self._first] = (self.path[self._first][0], lane)
            if self.owner:
                self.path.append((now, self.owner))
                self.lanes.begin(self.owner, now)
        self.lanes.end(lane, now)
        self.lanes.end("tools", now)

    def __deepcopy__(self, _: object) -> Track:
        """Return this track itself: an environment that is copied takes no lanes with it."""
        return self

    def fork(self) -> Track:
        """Return the track of an episode that branches off here."""
        return Track(self.lanes, list(self.path))

    def pieces(self) -> list[Piece]:
        """Return what it was at from its first stage to its end, in order and without gaps."""
        ends = [*(begin for begin, _ in self.path[1:]), self.end]
        return [(begin, end, owner) for (begin, owner), end in zip(self.path, ends, strict=True)]
