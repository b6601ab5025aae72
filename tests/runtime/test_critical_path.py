"""At each moment a step waits for exactly one thing."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agentrl.runtime.critical_path import EPISODES, QUEUE, find_critical_path, sum_by_owner, trace_critical_path
from agentrl.runtime.lanes import IDLE, Lanes, Stretch, Track

NOBODY = Lanes()


def track(*path: tuple[float, str], end: float) -> Track:
    return Track(NOBODY, list(path), end)


def test_it_waits_for_the_last_to_end_and_before_that_for_whoever_made_room() -> None:
    first = track((0.0, "generate"), (2.0, "tool/price"), (5.0, "generate"), end=6.0)
    beside = track((0.0, "generate"), end=3.0)  # nobody waited for it
    last = track((6.0, "generate"), (8.0, "reward"), end=9.0)
    assert trace_critical_path([last, beside, first], 1.0, 10.0) == [
        (1.0, 2.0, "generate"),
        (2.0, 5.0, "tool/price"),
        (5.0, 6.0, "generate"),
        (6.0, 8.0, "generate"),
        (8.0, 9.0, "reward"),
        (9.0, 10.0, QUEUE),
    ]


def test_its_own_work_is_waited_for_as_it_is_done() -> None:
    own = track((1.0, "env"), end=4.0)
    stretch = Stretch(0.0, 10.0, {}, {}, [own])
    marks = [(0.0, EPISODES), (4.0, "learn"), (7.0, "sync"), (8.0, IDLE)]
    assert find_critical_path(stretch, marks) == [
        (0.0, 1.0, QUEUE),
        (1.0, 4.0, "env"),
        (4.0, 7.0, "learn"),
        (7.0, 8.0, "sync"),
        (8.0, 10.0, IDLE),
    ]


TRACKS = st.lists(
    st.tuples(
        st.integers(0, 40), st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc")), min_size=1, max_size=5)
    )
)
MARKS = st.lists(st.tuples(st.integers(0, 60), st.sampled_from([EPISODES, "learn", "write", IDLE])), max_size=8)


@given(TRACKS, MARKS, st.integers(0, 20), st.integers(0, 40))
def test_whatever_is_played_it_is_the_wall_clock_without_overlap(
    played: list[tuple[int, list[tuple[int, str]]]], marks: list[tuple[int, str]], begin: int, lasts: int
) -> None:
    end = begin + lasts
    tracks = []
    for start, stages in played:
        now, path = float(start), []
        for length, owner in stages:
            path.append((now, owner))
            now += length
        if now <= end:  # it ended in the stretch
            tracks.append(track(*path, end=now))
    known = sorted((float(min(at, end)), owner) for at, owner in marks)
    pieces = find_critical_path(Stretch(float(begin), float(end), {}, {}, tracks), known)
    assert all(a[1] == b[0] and a[2] != b[2] for a, b in pairwise(pieces))
    assert all(a < b for a, b, _ in pieces)
    if lasts:
        assert (pieces[0][0], pieces[-1][1]) == (begin, end)
    assert sum(sum_by_owner(pieces).values()) == lasts
