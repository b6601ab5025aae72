"""Who was busy from when to when: unions of intervals that were measured, whatever overlaps."""

from __future__ import annotations

import copy
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agentrl.runtime.lanes import IDLE, KEPT, Lanes, Track, merge_intervals


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


OWNERS = ("generate", "tool/a", "env", "learn")
# Move the clock, then let an owner enter (True) or leave (False, where it is inside), or cut (None).
EVENTS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(OWNERS), st.sampled_from([True, True, False, False, None])),
    max_size=60,
)


@given(EVENTS)
def test_all_lanes_and_idle_are_the_wall_clock(events: list[tuple[int, str, bool | None]]) -> None:
    clock, inside = Clock(), dict.fromkeys(OWNERS, 0)
    lanes = Lanes(clock)
    moments: list[tuple[float, float, frozenset[str]]] = []  # the oracle: who was inside between two events
    stretches = []
    for passed, owner, what in [*events, (1, "env", None)]:
        moments.append((clock.now, clock.now + passed, frozenset(o for o in OWNERS if inside[o])))
        clock.now += passed
        if what is None:
            stretches.append((lanes.cut(), moments))
            moments = []
        elif what:
            lanes.begin(owner, clock.now)
            inside[owner] += 1
        elif inside[owner]:
            lanes.end(owner, clock.now)
            inside[owner] -= 1
    for stretch, own in stretches:
        for owner in OWNERS:
            assert stretch.seconds.get(owner, 0.0) == sum(b - a for a, b, who in own if owner in who)
        assert stretch.seconds[IDLE] == sum(b - a for a, b, who in own if not who)
        busy = {t for owner, its in stretch.intervals.items() if owner != IDLE for a, b in its for t in _seconds(a, b)}
        idle = {t for a, b in stretch.intervals[IDLE] for t in _seconds(a, b)}
        assert not busy & idle
        assert busy | idle == set(_seconds(stretch.begin, stretch.end))
    assert sum(stretch.wall for stretch, _ in stretches) == clock.now


def _seconds(begin: float, end: float) -> range:
    return range(int(begin), int(end))


@given(st.lists(st.integers(1, 9), min_size=2, max_size=80), st.integers(1, 20))
def test_joining_neighbours_closes_the_narrowest_gaps(lengths: list[int], most: int) -> None:
    edges = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    intervals = [(float(a), float(b)) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    joined = merge_intervals(intervals, most)
    assert len(joined) == min(most, len(intervals))
    assert (joined[0][0], joined[-1][1]) == (intervals[0][0], intervals[-1][1])
    gaps = sorted(b[0] - a[1] for a, b in pairwise(intervals))
    left = sorted(b[0] - a[1] for a, b in pairwise(joined))
    assert left == gaps[len(gaps) - len(left) :]


def test_a_lane_of_many_intervals_keeps_its_seconds_and_few_of_them() -> None:
    clock = Clock()
    lanes = Lanes(clock)
    for _ in range(5 * KEPT):
        lanes.begin("generate", clock.now)
        clock.now += 3.0
        lanes.end("generate", clock.now)
        clock.now += 1.0
    stretch = lanes.cut()
    assert stretch.seconds == {"generate": 15.0 * KEPT, IDLE: 5.0 * KEPT}
    assert all(len(its) <= 2 * KEPT for its in stretch.intervals.values())


def test_while_a_tool_runs_the_environment_does_not() -> None:
    clock = Clock()
    lanes = Lanes(clock)
    track = Track(lanes)
    track.enter("tools", 0.0)
    clock.now = 1.0
    track.call("fast")
    track.call("slow")
    clock.now = 2.0
    track.returned("fast")
    clock.now = 5.0
    track.returned("slow")
    clock.now = 6.0
    track.leave(6.0)
    lanes.ended(track)
    assert lanes.cut().seconds == {"env": 2.0, "tools": 4.0, "tool/fast": 1.0, "tool/slow": 4.0, IDLE: 0.0}
    assert track.pieces() == [(0.0, 1.0, "env"), (1.0, 5.0, "tool/slow"), (5.0, 6.0, "env")]


def test_a_branch_has_come_the_same_way_and_goes_its_own() -> None:
    clock = Clock()
    trunk = Track(Lanes(clock))
    trunk.enter("generate", 0.0)
    trunk.leave(1.0)
    branch = trunk.fork()
    branch.enter("tools", 1.0)
    assert [owner for _, owner in branch.path] == ["generate", "env"]
    assert [owner for _, owner in trunk.path] == ["generate"]
    assert copy.deepcopy(trunk) is trunk  # an environment that is copied deeply takes no lanes with it
