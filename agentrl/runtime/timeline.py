"""The time of a run, stretch by stretch: a step's lanes, what it waited for, and the numbers and picture of both."""

from __future__ import annotations

import time
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any, NamedTuple

from agentrl.runtime.critical_path import EPISODES, find_critical_path, sum_by_owner
from agentrl.runtime.lanes import IDLE, Interval, Lanes, Piece, merge_intervals

ALWAYS = ("generate", "tools", "env", "reward", "learn", "sync", "write", IDLE)  # lanes that every row of a step has
DRAWN = 120  # intervals of a lane, and pieces of the waited-for lane, in a picture
TOOLS = 12  # lanes of tools in a picture, those with the most seconds; `tools` has them all


class MeasuredStretch(NamedTuple):
    """A stretch of time as numbers and as a picture: `values` are metrics; `picture` is its line in timeline.jsonl."""

    wall: float
    cpu: float
    values: dict[str, float]
    picture: dict[str, Any]


class Timeline:
    """Lanes, and what the run waits for. Each stretch ends where the next begins, so that none is counted twice.

    Args:
        elapsed: seconds that the run had lasted before, where it was resumed.
    """

    def __init__(
        self,
        elapsed: float = 0.0,
        clock: Callable[[], float] = perf_counter,
        cpu_clock: Callable[[], float] = process_time,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self.clock, self.cpu_clock, self.unix_clock = clock, cpu_clock, unix_clock
        self.lanes = Lanes(clock)
        self._start = self.lanes.begun - elapsed
        self._cpu = cpu_clock()
        self._own = ""  # the lane of what the run does itself
        self._marks: list[tuple[float, str]] = [(self.lanes.begun, IDLE)]
        self._since = self.lanes.begun  # the last mark

    @property
    def elapsed(self) -> float:
        """Return the seconds since the run's start, without those between a kill and a resume."""
        return self.clock() - self._start

    def at(self, owner: str) -> None:
        """Note that from now on the run does this; or it waits for `EPISODES`, or for nothing (`IDLE`)."""
        now = self.clock()
        if self._own:
            self.lanes.end(self._own, now)
        self._own = "" if owner in (EPISODES, IDLE) else owner
        if self._own:
            self.lanes.begin(self._own, now)
        self._marks.append((now, owner))
        self._since = now

    def find_current(self) -> tuple[str, float]:
        """Return what the run is at, and for how many seconds."""
        return self._marks[-1][1], self.clock() - self._since

    def cut(self) -> MeasuredStretch:
        """Return the stretch since the last cut. What is open goes on in the next."""
        stretch, cpu, cpu_before = self.lanes.cut(), self.cpu_clock(), self._cpu
        waited = find_critical_path(stretch, self._marks)
        self._cpu, self._marks = cpu, [(stretch.end, self._marks[-1][1])]
        values = {f"time/{owner}": stretch.seconds.get(owner, 0.0) for owner in ALWAYS}
        values |= {f"time/{owner}": seconds for owner, seconds in stretch.seconds.items()}
        values |= {f"wait/{owner}": seconds for owner, seconds in sum_by_owner(waited).items()}
        values |= {"clock/unix": self.unix_clock(), "clock/elapsed": stretch.end - self._start}
        picture = {
            "begin": round(stretch.begin - self._start, 4),
            "seconds": round(stretch.wall, 4),
            "busy": {owner: round(seconds, 4) for owner, seconds in stretch.seconds.items()},
            "lanes": {
                owner: _relative(stretch.intervals[owner], stretch.begin) for owner in _drawn_lanes(stretch.seconds)
            },
            "waited": thin_pieces(waited, stretch.begin),
        }
        return MeasuredStretch(stretch.wall, cpu - cpu_before, values, picture)


def _drawn_lanes(seconds: dict[str, float]) -> list[str]:
    shown = [owner for owner in seconds if seconds[owner] > 0]
    tools = sorted((owner for owner in shown if owner.startswith("tool/")), key=lambda owner: -seconds[owner])
    return [owner for owner in shown if not owner.startswith("tool/")] + tools[:TOOLS]


def _relative(intervals: list[Interval], begin: float) -> list[list[float]]:
    return [[round(a - begin, 4), round(b - begin, 4)] for a, b in merge_intervals(intervals, DRAWN)]


def thin_pieces(pieces: list[Piece], begin: float) -> list[list[Any]]:
    """Return at most `DRAWN` pieces as [begin, end, owner], without gaps: the shortest join the one before."""
    longest = sorted((b - a for a, b, _ in pieces), reverse=True)
    least = longest[DRAWN - 1] if len(longest) > DRAWN else 0.0
    found: list[list[Any]] = []
    for a, b, owner in pieces:
        if found and (b - a < least or found[-1][2] == owner or len(found) >= DRAWN):
            found[-1][1] = round(b - begin, 4)
        else:
            found.append([round(a - begin, 4), round(b - begin, 4), owner])
    return found
