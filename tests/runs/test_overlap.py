"""Prompts that are trained on and measured with are counted, and said."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl import Env, Reply, Step, train
from agentrl.runs.overlap import PromptOverlap
from agentrl.training.callbacks import Callback
from agentrl.types import Observation, Segment, Stop, Trajectory


def asked(*prompts: str) -> list[Trajectory]:
    """Episodes with these prompts; one that was lost in its reset has none."""
    return [
        Trajectory(0, (Segment("prompt", tuple(p.encode())),) if p else (), (), Stop.TERMINATED) for p in (*prompts, "")
    ]


def test_prompts_in_both_splits_are_counted_once_each_and_said_when_there_are_more() -> None:
    seen = PromptOverlap()
    seen.add_held_out(asked("a", "b", "b", "c"))
    assert seen.new_warnings() == []
    seen.add_trained(asked("c", "c", "d"))
    assert seen.counts() == {"held_out": 3, "also_trained": 1}
    (sentence,) = seen.new_warnings()
    assert "1 of 3 held-out prompts were trained on too" in sentence
    again = pickle.loads(pickle.dumps(seen))
    assert again.new_warnings() == []
    again.add_trained(asked("a", "b"))
    assert "3 of 3" in again.new_warnings()[0]


def test_where_all_tasks_begin_alike_nothing_is_said() -> None:
    seen = PromptOverlap()
    seen.add_held_out(asked("guess", "guess"))
    seen.add_trained(asked("guess"))
    assert seen.new_warnings() == []
    assert seen.counts() == {"held_out": 1, "also_trained": 1}


class Quiz(Env):
    """README's way of making a task: the seed alone chooses among a few."""

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return f"question {seed % 5}", {}

    async def step(self, action: Reply) -> Step:
        return Step([], float(len(action.content)), True, False, {})


class Listening(Callback):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_message(self, text: str) -> None:
        self.heard.append(text)


@pytest.mark.slow
def test_a_run_says_in_its_summary_where_held_out_prompts_were_trained_on(tmp_path: Path) -> None:
    callback = Listening()
    summary = train(
        Quiz,
        steps=2,
        rollout={"tasks_per_step": 3, "group_size": 2, "max_tokens": 2},
        eval={"every": 0, "final_tasks": 4},
        run={"dir": str(tmp_path / "run")},
        callbacks=[callback],
    ).summary
    assert summary["prompts"] == {"held_out": 4, "also_trained": 4}
    assert sum("4 of 4 held-out prompts were trained on too" in text for text in callback.heard) == 1
