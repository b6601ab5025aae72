"""The lanes of players' episodes, in the run's own seconds."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agentrl.players.told_lanes import describe_stretch, include_stretch
from agentrl.runtime.lanes import IDLE, TOLD, Lanes, Track, unite_intervals
from tests.runtime.test_lanes import Clock

INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 8)).map(lambda pair: (pair[0], sum(pair))), max_size=8
)


def test_lanes_of_several_players_are_united_with_the_runs_own() -> None:
    """Each player has a clock of its own, which began at another moment."""
    clock = Clock()
    lanes = Lanes(clock)
    players = [(Clock(), 100.0), (Clock(), 7000.0)]
    for own, begun in players:
        own.now = begun
    theirs = [Lanes(own) for own, _ in players]

    def go_on(seconds: float) -> None:
        for each in (clock, *(own for own, _ in players)):
            each.now += seconds

    for number, other in enumerate(theirs):  # 0..2 generate by the first, 1..4 by the second, a tool at 2..3
        track = Track(other)
        track.enter("generate", other.clock())
        if not number:
            go_on(1)
            continue
        go_on(1)
        theirs[0].end("generate", theirs[0].clock())
        track.call("price")
        go_on(1)
        track.returned("price")
        go_on(1)
        track.leave(other.clock())
        other.ended(track)
    go_on(1)
    for other in theirs:
        include_stretch(describe_stretch(other.cut(), other.clock()), lanes)
    stretch = lanes.cut()
    assert stretch.seconds["generate"] == 3.0  # 0..2 and 3..4: a tool took its episode out of the lane
    assert stretch.seconds["tool/price"] == stretch.seconds["tools"] == 1.0
    assert stretch.seconds[IDLE] == 1.0
    [track] = stretch.tracks
    assert track.pieces() == [(1.0, 2.0, "generate"), (2.0, 3.0, "tool/price"), (3.0, 4.0, "generate")]
    assert lanes.cut().seconds == {IDLE: 0.0}


@given(INTERVALS, INTERVALS, st.integers(0, 20))
def test_a_union_is_that_of_its_seconds(ours: list[tuple[int, int]], theirs: list[tuple[int, int]], begin: int) -> None:
    united = unite_intervals([*ours, *theirs], begin, 30)
    seconds = {t for a, b in [*ours, *theirs] for t in range(max(a, begin), min(b, 30))}
    assert {t for a, b in united for t in range(int(a), int(b))} == seconds
    assert sum(b - a for a, b in united) == len(seconds)
    assert all(a < b < c < d for (a, b), (c, d) in pairwise(united))


def test_what_is_told_many_times_before_a_cut_is_kept_in_little_room() -> None:
    clock = Clock()
    lanes = Lanes(clock)
    for second in range(3 * TOLD):
        clock.now = second + 1.0
        include_stretch({"lanes": {"generate": [1.0, 0.75, 0.5, 0.0]}}, lanes)
    assert max(map(len, lanes._elsewhere.values())) <= TOLD
    stretch = lanes.cut()
    assert stretch.seconds["generate"] == 3 * TOLD * 0.75
    assert stretch.seconds[IDLE] == 3 * TOLD * 0.25
