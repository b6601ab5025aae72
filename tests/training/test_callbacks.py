"""Callbacks: several hear the same, ask the run for things, and a hook that nobody would call is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl import train
from agentrl.errors import ContractError
from agentrl.evaluation.measurement import Evaluation
from agentrl.training.callbacks import Callback, Callbacks
from agentrl.types import Trajectory

SMALL: dict[str, Any] = {
    "rollout": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 32},
    "eval": {"every": 0, "final_tasks": 1},
}


class Heard(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


class Asks(Callback):
    """Asks for an evaluation and a checkpoint after step 1, and for the end after step 2."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.summary: Mapping[str, Any] = {}
        self.checkpoints: list[Path] = []

    def on_step_begin(self, step: int) -> None:
        assert not self.control.should_evaluate
        self.heard.append(("begin", step))

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self.heard.append(("end", step))
        self.control.should_evaluate = self.control.should_save = step == 1
        self.control.should_training_stop = step == 2

    def on_evaluate(self, step: int, evaluation: Evaluation) -> None:
        self.heard.append(("evaluate", step))

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.heard.append(("log" if "loss" in metrics or "policy_version" in metrics else "log eval", step))

    def on_save(self, step: int, checkpoint: Path) -> None:
        assert (checkpoint / "state.json").is_file()
        self.heard.append(("save", step))

    def on_train_end(self, summary: Mapping[str, Any]) -> None:
        self.summary = summary


def test_several_callbacks_hear_the_same() -> None:
    one, other = Heard(), Heard()
    both = Callbacks([one, other])
    both.on_message("a")
    both.on_phase_begin("learn", 0)
    assert one.texts == other.texts == ["a"]
    assert one.control is other.control is both.control


@pytest.mark.slow
def test_a_callback_has_an_evaluation_and_a_checkpoint_made_and_ends_the_run(tmp_path: Path) -> None:
    asks = Asks()
    run = train("math-tools", steps=4, callbacks=[asks], run={"dir": str(tmp_path / "run"), "save_every": 0}, **SMALL)
    first = [("log eval", 0), ("evaluate", 0)]
    second = [("begin", 1), ("end", 1), ("log", 1), ("log eval", 1), ("evaluate", 1), ("save", 1)]
    third = [("begin", 2), ("end", 2), ("log", 2), ("save", 2), ("log eval", 2), ("evaluate", 2)]
    assert asks.heard == first + second + third
    assert asks.summary["steps"] == run.summary["steps"] == run.summary["checkpoint"] == 2
    assert not run.summary["interrupted"]
    assert run.summary["episode_after"].startswith("test-2:")
    assert sorted(p.name for p in (run.folder / "trajectories").glob("test-*")) == [
        f"test-{step:06d}.parquet" for step in (0, 1, 2)
    ]
    again = train("math-tools", steps=3, run={"dir": str(tmp_path / "run"), "save_every": 0, "resume": True}, **SMALL)
    assert again.summary["steps"] == 3


@pytest.mark.slow
def test_what_a_callback_raises_ends_the_run_and_what_was_saved_resumes(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_save(self, step: int, checkpoint: Path) -> None:
            raise OSError("the callback's own")

    settings = {"run": {"dir": str(tmp_path / "run"), "save_every": 1}, "steps": 2, **SMALL}
    with pytest.raises(OSError, match="the callback's own"):
        train("math-tools", callbacks=[Fails()], **settings)
    settings["run"]["resume"] = True
    assert train("math-tools", **settings).summary["steps"] == 2


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(ContractError, match=r"subclasses of agentrl\.Callback or of transformers.*, not <class"):
        Callbacks([Heard])  # type: ignore[list-item]


def test_a_hook_that_nobody_would_call_is_refused_with_the_nearest_name() -> None:
    misspelt = type("Mine", (Callback,), {"on_step_ends": lambda self: None})
    with pytest.raises(ContractError, match=r"Mine.on_step_ends: there is no .*; did you mean 'on_step_end'"):
        Callbacks([misspelt()])


def test_an_async_hook_is_refused() -> None:
    async def on_message(self: Callback, text: str) -> None: ...

    with pytest.raises(ContractError, match=r"Mine.on_message must be a plain `def`, not `async def`"):
        Callbacks([type("Mine", (Callback,), {"on_message": on_message})()])


class Counter(Callback):
    """Counts the episodes of a run, also where it is resumed."""

    def __init__(self, at: int = 0) -> None:
        self.episodes, self.at = 0, at

    def on_episode_end(self, trajectory: Trajectory) -> None:
        self.episodes += 1

    def on_step_end(self, step: int, metrics: Any) -> None:
        if step == self.at:
            raise ProcessLookupError("killed")

    def state(self) -> object:
        return {"episodes": self.episodes}

    def load(self, state: Any) -> None:
        self.episodes = state["episodes"]


@pytest.mark.slow
def test_what_a_callback_returns_as_its_state_is_in_the_checkpoint(tmp_path: Path) -> None:
    exact: dict[str, Any] = SMALL | {"steps": 3, "deterministic": True}
    whole, killed, resumed = Counter(), Counter(at=2), Counter()
    train("math-tools", callbacks=[whole], run={"dir": str(tmp_path / "a"), "save_every": 1}, **exact)
    run = {"dir": str(tmp_path / "b"), "save_every": 1}
    with pytest.raises(ProcessLookupError):
        train("math-tools", callbacks=[killed], run=run, **exact)
    train("math-tools", callbacks=[resumed], run={**run, "resume": True}, **exact)
    assert resumed.episodes == whole.episodes


def test_states_belong_to_their_callbacks_by_name() -> None:
    one, two = Counter(), Counter()
    one.episodes, two.episodes = 1, 2
    state = Callbacks([one, two, Heard()]).state()
    assert state == {"Counter": {"episodes": 1}, "Counter 2": {"episodes": 2}}
    again = Counter()
    Callbacks([again]).load({**state, "Gone": 3})
    assert again.episodes == 1


def test_a_state_that_no_checkpoint_can_hold_is_refused() -> None:
    odd = type("Odd", (Callback,), {"state": lambda self: lambda: None})
    with pytest.raises(ContractError, match=r"Odd\.state returns what no checkpoint can hold"):
        Callbacks([odd()]).state()


def test_what_a_callback_of_the_settings_raises_is_a_sentence_and_an_objects_stays_as_it_is() -> None:
    class Fails(Callback):
        def on_step_begin(self, step: int) -> None:
            raise KeyError("gone")

        def state(self) -> object:
            raise SystemExit(3)

    named, own = Fails(), Fails()
    with pytest.raises(ContractError, match=r"callback Fails\.on_step_begin raised KeyError: 'gone' \(test_callbacks"):
        Callbacks([named], [named]).on_step_begin(1)
    with pytest.raises(ContractError, match=r"callback Fails\.state raised SystemExit: 3"):
        Callbacks([named], [named]).state()
    with pytest.raises(KeyError):
        Callbacks([own], []).on_step_begin(1)


def test_a_run_begins_with_a_look_at_the_states_and_ends_as_a_callback_exits(tmp_path: Path) -> None:
    class Exits(Callback):
        odd: Any = None

        def on_step_end(self, step: int, metrics: Any) -> None:
            metrics["reward"] = 99.0
            raise SystemExit(4)

        def state(self) -> object:
            return self.odd

    settings = {**SMALL, "steps": 1, "verbose": False}
    exits = Exits()
    with pytest.raises(SystemExit):
        train("math-tools", callbacks=[exits], run={"dir": str(tmp_path / "a")}, **settings)
    exits.odd = lambda: None
    with pytest.raises(ContractError, match=r"Exits\.state returns what no checkpoint can hold"):
        train("math-tools", callbacks=[exits], run={"dir": str(tmp_path / "b")}, **settings)
    assert not (tmp_path / "b" / "metrics.jsonl").exists(), "it is refused before anything is evaluated"
