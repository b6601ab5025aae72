"""The watch over a run's processes: one sentence, and what each process is at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl import train
from agentrl.learner.roll_call import RankPlace
from agentrl.runtime.stalls import Wait
from agentrl.training.process_watch import describe_now, list_ranks

SEARCH = [Wait("tool 'search' at player rack-3", s) for s in (94.0, 2.0, 1.0)]
LEARNS = RankPlace("learner/packing.py:12 pack", 30.0)
WAITS, IDLE = RankPlace("waits", 29.0), RankPlace("idle", 400.0)


@pytest.mark.parametrize(
    ("at", "waits", "evaluation", "places", "sentence"),
    [
        (
            *("episodes", SEARCH, [], {}),
            "The learner waits for rollouts (95 s): 3 episodes wait on tool 'search' at player rack-3 (oldest 94 s).",
        ),
        ("episodes", [], [], {}, "The learner waits for rollouts (95 s): the first of them begin."),
        ("learn", [], [], {}, "The learner updates the policy (95 s). Rollouts wait for the learner."),
        (
            *("learn", SEARCH[:1], [], {}),
            "The learner updates the policy (95 s); 1 episode waits on tool 'search' at player rack-3 (94 s).",
        ),
        (
            *("learn", [], [], {0: WAITS, 1: LEARNS, 2: WAITS}),
            "Ranks 0 and 2 of the learner wait for rank 1, which has been at learner/packing.py:12 pack for 30 s. "
            "Rollouts wait for the learner.",
        ),
        (
            *("learn", [], [], {0: LEARNS, 1: LEARNS}),
            "The learner updates the policy (95 s). Rollouts wait for the learner.",
        ),
        ("sync", [], [], {}, "The engine is given new weights (95 s); rollouts wait for that."),
        ("checkpoint", [], [], {}, "A checkpoint is written (95 s); rollouts wait for that."),
        (
            *("idle", [], SEARCH[1:2], {}),
            "The learner waits for an evaluation: 1 episode waits on tool 'search' at player rack-3 (2 s).",
        ),
        ("idle", [], [], {}, "The run is between two steps (95 s); rollouts wait for that."),
    ],
)
def test_a_sentence_says_who_waits_on_whom(
    at: str, waits: list[Wait], evaluation: list[Wait], places: dict[int, RankPlace], sentence: str
) -> None:
    assert describe_now(at, 95.4, waits, evaluation, places) == sentence


@pytest.mark.parametrize(
    ("at", "evaluation", "places", "sentence"),
    [
        ("episodes", [], {}, "The learner takes its next demonstrations (95 s)."),
        ("learn", [], {}, "The learner updates the policy (95 s)."),
        (
            *("learn", [], {0: WAITS, 1: LEARNS}),
            "Rank 0 of the learner waits for rank 1, which has been at learner/packing.py:12 pack for 30 s.",
        ),
        ("sync", [], {}, "The engine is given new weights (95 s)."),
        ("checkpoint", [], {}, "A checkpoint is written (95 s)."),
        ("idle", [], {}, "The run is between two steps (95 s)."),
        (
            *("episodes", SEARCH[1:2], {}),
            "The learner waits for an evaluation: 1 episode waits on tool 'search' at player rack-3 (2 s).",
        ),
    ],
)
def test_no_rollouts_wait_for_a_run_that_learns_from_demonstrations(
    at: str, evaluation: list[Wait], places: dict[int, RankPlace], sentence: str
) -> None:
    assert describe_now(at, 95.4, [], evaluation, places, demonstrates=True) == sentence


def test_of_many_ranks_that_wait_a_few_are_named() -> None:
    places = dict.fromkeys(range(64), WAITS) | {9: LEARNS}
    said = describe_now("learn", 30.0, [], [], places)
    assert said.startswith("Ranks 0 and 1 and 2 and 3 of the learner wait (and 59 more) for rank 9, which")


@pytest.mark.parametrize(
    ("places", "own", "at"),
    [
        ([LEARNS, LEARNS], "learns", ["learns", "learns"]),
        ([WAITS, LEARNS], "learns", ["rank 1", "learns"]),
        ([LEARNS, WAITS], "learns", ["learns", "rank 0"]),
        ([WAITS, LEARNS, LEARNS], "learns", ["other ranks", "learns", "learns"]),
        ([WAITS, WAITS], "learns", ["exchanges", "exchanges"]),
        ([IDLE, WAITS], "rollouts", ["rollouts", "rollouts"]),
        ([IDLE, WAITS], "writes", ["writes", "rank 0"]),
        ([IDLE, IDLE], "rollouts", ["rollouts", "rollouts"]),
        ([IDLE, IDLE], "new weights", ["new weights", "rank 0"]),
        ([LEARNS, IDLE], "learns", ["learns", "rank 0"]),
        ([LEARNS, LEARNS, IDLE], "learns", ["learns", "learns", "other ranks"]),
    ],
)
def test_a_rank_learns_or_waits_for_another_or_for_rollouts(places: list[RankPlace], own: str, at: list[str]) -> None:
    listed = list_ranks(dict(enumerate(places)), own)
    assert [rank.name for rank in listed] == [f"rank {n}" for n in range(len(places))]
    assert [next(iter(rank.doing)) for rank in listed] == at


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_run_without_players_tells_of_its_own_process(tmp_path: Path) -> None:
    run = train(
        env="math-tools",
        steps=2,
        rollout={"tasks_per_step": 2, "group_size": 2, "max_tokens": 32},
        eval={"every": 1, "tasks": 2, "final_tasks": 2},
        run={"dir": str(tmp_path / "run")},
    )
    lines = read(run.folder, "processes.jsonl")
    assert [(line["step"], line["kind"]) for line in lines] == [(1, "step"), (2, "step")]
    by_step = {line["step"]: line for line in read(run.folder, "metrics.jsonl") if "step_time" in line}
    for line in lines:
        ((kind, name, groups, seconds),) = line["processes"]
        assert (kind, name, groups) == ("rollouts", "in the run's process", 0)
        assert sum(seconds.values()) == pytest.approx(line["seconds"], abs=0.05)
        assert line["seconds"] == pytest.approx(by_step[line["step"]]["step_time"], abs=0.2), "an evaluation is in none"
    now = json.loads((run.folder / "waits.json").read_text())
    assert {"step", "unix", "elapsed", "sentence", "processes"} == now.keys()
    assert now["sentence"].endswith(".")
