"""Prompts that are trained on and measured with are counted, and said."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl import Env, Reply, Step, train
from agentrl.overlap import Overlap
from agentrl.types import Observation, Segment, Stop, Trajectory
from agentrl.watching import Watcher


def asked(*prompts: str) -> list[Trajectory]:
    """Episodes with these prompts; one that was lost in its reset has none."""
    return [
        Trajectory(0, (Segment("prompt", tuple(p.encode())),) if p else (), (), Stop.TERMINATED) for p in (*prompts, "")
    ]


def test_prompts_in_both_splits_are_counted_once_each_and_said_when_there_are_more() -> None:
    seen = Overlap()
    seen.hold_out(asked("a", "b", "b", "c"))
    assert seen.look() == []
    seen.train(asked("c", "c", "d"))
    assert seen.counts() == {"held_out": 3, "also_trained": 1}
    (sentence,) = seen.look()
    assert "1 of 3 held-out prompts were trained on too" in sentence
    again = pickle.loads(pickle.dumps(seen))
    assert again.look() == []
    again.train(asked("a", "b"))
    assert "3 of 3" in again.look()[0]


def test_where_all_tasks_begin_alike_nothing_is_said() -> None:
    seen = Overlap()
    seen.hold_out(asked("guess", "guess"))
    seen.train(asked("guess"))
    assert seen.look() == []
    assert seen.counts() == {"held_out": 1, "also_trained": 1}


class Quiz(Env):
    """README's way of making a task: the seed alone chooses among a few."""

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return f"question {seed % 5}", {}

    async def step(self, action: Reply) -> Step:
        return Step([], float(len(action.content)), True, False, {})


class Listening(Watcher):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def said(self, text: str) -> None:
        self.heard.append(text)


def test_a_run_says_in_its_summary_where_held_out_prompts_were_trained_on(tmp_path: Path) -> None:
    watcher = Listening()
    summary = train(
        Quiz,
        steps=2,
        rollout={"tasks": 3, "group_size": 2, "max_turn_tokens": 2},
        eval={"every": 0, "final_tasks": 4},
        run={"dir": str(tmp_path / "run")},
        watcher=watcher,
    )
    assert summary["prompts"] == {"held_out": 4, "also_trained": 4}
    assert sum("4 of 4 held-out prompts were trained on too" in text for text in watcher.heard) == 1
