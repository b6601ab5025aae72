"""Activities of processes, in seconds that sum to those that they were there."""

from __future__ import annotations

import json

import pytest

from agentrl.runtime.activity import (
    LONGEST_NAME,
    MORE,
    MOST_PROCESSES,
    MOST_THINGS,
    ActivityCount,
    ActivityLog,
    ProcessActivity,
    describe_activities,
    sum_waits,
)
from agentrl.runtime.stalls import Wait


def player(name: str, answered: int = 0, **doing: float) -> ProcessActivity:
    shown = {what: ActivityCount(number, number) for what, number in doing.items()}
    return ProcessActivity("player", name, shown, answered=answered)


def test_waits_are_summed_by_what_is_waited_for() -> None:
    waits = [Wait("the engine", 2.0), Wait("tool 'search'", 94.0), Wait("the engine", 5.0)]
    assert sum_waits(waits, 3, "the learner") == {
        "the engine": (2, 5.0),
        "tool 'search'": (1, 94.0),
        "a free slot": (3, 0.0),
    }
    assert sum_waits([], 0, "the learner") == {"the learner": (1, 0.0)}


def test_a_moment_is_divided_among_the_episodes_of_a_process() -> None:
    log = ActivityLog()
    log.add([player("a", engine=3, tool=1), player("b", engine=2)], 4.0)
    log.add([player("a", answered=5, learner=1)], 2.0)
    line = log.cut()
    assert line == {
        "seconds": 6.0,
        "processes": [
            ["player", "a", 5, {"engine": 3.0, "learner": 2.0, "tool": 1.0}],
            ["player", "b", 0, {"engine": 4.0}],
        ],
    }


def test_a_cut_begins_anew_and_counts_a_group_once() -> None:
    log = ActivityLog()
    log.add([player("a", answered=5, engine=1)], 1.0)
    log.cut()
    log.add([player("a", answered=7, engine=1)], 1.0)
    assert log.cut()["processes"] == [["player", "a", 2, {"engine": 1.0}]]
    assert log.cut() == {"seconds": 0.0, "processes": []}


def test_a_player_that_joins_anew_counts_its_groups_from_none() -> None:
    log = ActivityLog()
    log.add([player("a", answered=5, engine=1)], 1.0)
    log.cut()
    log.add([player("a", answered=0, engine=1)], 1.0)
    log.add([player("a", answered=3, engine=1)], 1.0)
    assert log.cut()["processes"] == [["player", "a", 3, {"engine": 2.0}]]


def test_a_cut_looks_first_so_that_no_second_goes_to_the_next_step() -> None:
    log = ActivityLog()
    log.look = lambda: log.add([player("a", engine=1)], 0.5)
    assert log.cut()["seconds"] == 0.5


@pytest.mark.parametrize("count", [MOST_PROCESSES, MOST_PROCESSES + 1, 1000])
def test_a_line_is_bounded_whatever_a_run_has(count: int) -> None:
    log = ActivityLog()
    doing = {f"tool '{n}{'x' * 500}{end}'": ActivityCount(1, 1.0) for n in range(20) for end in "ab"}
    log.add([ProcessActivity("player", f"p{n:04}" + "y" * 500, doing, answered=1) for n in range(count)], 40.0)
    processes = log.cut()["processes"]
    assert len(processes) == min(count, MOST_PROCESSES)
    assert sum(row[2] for row in processes) == count
    for _, name, _, seconds in processes:
        assert len(name) <= LONGEST_NAME
        assert sum(seconds.values()) == pytest.approx(40.0)
        assert len(seconds) <= MOST_THINGS + 1
        assert MORE in seconds
        assert all(len(what) <= LONGEST_NAME for what in seconds)


def test_of_very_many_processes_those_beyond_are_one_row_of_each_kind() -> None:
    log = ActivityLog()
    ranks = [ProcessActivity("rank", f"rank {n}", {"learns": ActivityCount(1, 1.0)}) for n in range(200)]
    players = [player(f"p{n}", answered=1, engine=1) for n in range(50)]
    log.add([*ranks, ProcessActivity("server", "s", {"turns": ActivityCount(2, 0.0)}), *players], 40.0)
    processes = log.cut()["processes"]
    assert len(processes) == MOST_PROCESSES
    assert processes[-3:] == [
        ["rank", f"mean of {200 - (MOST_PROCESSES - 3)} more", 0, {"learns": 40.0}],
        ["server", "s", 0, {"turns": 40.0}],
        ["player", "mean of 50 more", 50, {"engine": 40.0}],
    ]


def test_of_very_many_players_those_are_described_that_wait_longest() -> None:
    players = [player(f"p{n}", engine=1 + n % 300) for n in range(300)]
    server = ProcessActivity("server", "s", {"turns": ActivityCount(2, 0.0)})
    described = describe_activities([*players, server])
    assert len(described) == MOST_PROCESSES
    assert [p["name"] for p in described[:2]] == ["s", "p299"]
    assert described[0] == {"kind": "server", "name": "s", "doing": {"turns": [2, 0.0]}}


def test_a_step_of_a_hundred_players_takes_a_few_kilobytes() -> None:
    log = ActivityLog()
    at = {"the engine": 30, "tool 'search'": 9, "tool 'python'": 4, "MathTools.score": 1, "the learner": 3}
    doing = {what: ActivityCount(number, 1.0) for what, number in at.items()}
    log.add([ProcessActivity("player", f"rack-{n:03}-12345", doing, answered=7) for n in range(100)], 61.7)
    assert len(json.dumps(log.cut())) < 16_000
