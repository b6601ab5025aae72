"""transformers' callbacks: they are told what their trainer would tell them, and their control is heeded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import DefaultFlowCallback, EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations import TensorBoardCallback

from agentrl import Callback, ContractError, train
from agentrl.errors import UserError
from agentrl.library.trainer_callbacks import adapt_callbacks

SMALL: dict[str, Any] = {"rollout": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 32}, "verbose": False}
QUICK: dict[str, Any] = {**SMALL, "eval": {"every": 0, "final_tasks": 1}}


class Follows(TrainerCallback):  # type: ignore[misc]
    """Keeps what it is told; asks for an evaluation and a checkpoint after step 1, and for the end after step 2."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.log: list[Mapping[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert kwargs["model"].config.vocab_size
        assert kwargs["processing_class"].encode("a")
        self.max_steps, self.args = (state.max_steps, args.max_steps), args

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert not control.should_evaluate
        self.told.append(("begin", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.told.append(("end", state.global_step))
        control.should_evaluate = control.should_save = state.global_step == 1
        control.should_training_stop = state.global_step == 2
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, float], **kwargs: Any) -> None:
        assert 0.0 <= metrics["eval_reward"] <= 1.0
        assert state.log_history[-1]["eval_reward"] == metrics["eval_reward"]
        self.told.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told.append(("save", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.log, self.best = state.log_history, state.best_metric


@pytest.mark.slow
def test_a_callback_of_transformers_hears_the_state_and_its_control_is_heeded(tmp_path: Path) -> None:
    follows = Follows()
    run = train(
        "math-tools", steps=5, callbacks=[follows], run={"dir": str(tmp_path / "run"), "save_every": 0}, **QUICK
    )
    first, second = [("evaluate", 0), ("begin", 0)], [("end", 1), ("evaluate", 1), ("save", 1), ("begin", 1)]
    assert follows.told == [*first, *second, ("end", 2), ("save", 2), ("evaluate", 2)]
    assert run.summary["steps"] == 2
    assert follows.max_steps == (5, 5)
    assert follows.args.output_dir == str(tmp_path / "run")
    assert follows.args.learning_rate == run.config["learner"]["lr"]
    logged = {row["step"]: row for row in follows.log if "loss" in row or "reward" in row}
    written = {row["step"]: row for row in run.metrics if "policy_version" in row}
    assert logged[2]["reward"] == written[2]["reward"]
    assert logged[2]["learning_rate"] == written[2]["lr"]
    assert follows.best == max(e["reward"] for e in run.evaluations if e["reward"] is not None)


def test_early_stopping_stops_once_the_reward_no_longer_rises(tmp_path: Path) -> None:
    settings = {**SMALL, "eval": {"every": 1, "tasks": 1, "final_tasks": 1}, "learner": {"lr": 1e-12}}
    patience = EarlyStoppingCallback(early_stopping_patience=2)
    run = train("math-tools", steps=9, callbacks=[patience], run={"dir": str(tmp_path / "run")}, **settings)
    assert run.summary["steps"] == 2  # the evaluation before the first step is the best, and two are no better
    assert not run.summary["interrupted"]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_state_and_the_patience(tmp_path: Path) -> None:
    settings = {**SMALL, "eval": {"every": 1, "tasks": 1, "final_tasks": 1}, "learner": {"lr": 1e-12}}
    folder = {"dir": str(tmp_path / "run"), "save_every": 1, "resume": True}
    first, second, follows = EarlyStoppingCallback(3), EarlyStoppingCallback(3), Follows()
    follows.on_step_end = lambda args, state, control, **kwargs: None  # type: ignore[method-assign]
    train("math-tools", steps=2, callbacks=[first, follows], run=folder, **settings)
    before = len(follows.log)
    run = train("math-tools", steps=9, callbacks=[second, follows], run=folder, **settings)
    assert 1 <= first.early_stopping_patience_counter < 3
    assert second.early_stopping_patience_counter >= 3
    assert run.summary["steps"] <= 4
    assert [row["step"] for row in follows.log[: before - 1]] == [0, 1, 1, 2]


def test_early_stopping_without_evaluations_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"EarlyStoppingCallback.on_train_begin: .*requires IntervalStrategy"):
        train("math-tools", callbacks=[EarlyStoppingCallback()], run={"dir": str(tmp_path / "run")}, **QUICK)


def test_the_callbacks_of_transformers_print_and_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [PrinterCallback(), ProgressCallback(), DefaultFlowCallback(), TensorBoardCallback()]
    run = train("math-tools", steps=2, callbacks=callbacks, run={"dir": str(tmp_path / "run")}, **QUICK)
    out, err = capsys.readouterr()
    assert "'eval_reward': " in out
    assert "2/2" in err  # the bar
    [events] = run.folder.glob("runs/*/events*")
    accumulated = EventAccumulator(str(events))
    accumulated.Reload()
    assert [e.step for e in accumulated.Scalars("train/reward")] == [1, 2]
    assert {"eval/reward", "train/learning_rate"} <= set(accumulated.Tags()["scalars"])


def test_a_hook_that_is_never_called_is_warned_of() -> None:
    class Epochs(TrainerCallback):  # type: ignore[misc]
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    with pytest.warns(UserWarning, match=r"Epochs.on_epoch_end is never called"), pytest.raises(ContractError):
        train("math-tools", callbacks=[Epochs(), "none"], **QUICK)


def test_a_callback_without_a_list_around_it_is_a_sentence() -> None:
    for given in (Callback(), None):
        with pytest.raises(ContractError, match=r"callbacks takes a list of callbacks"):
            adapt_callbacks(given)  # type: ignore[arg-type]


def test_without_accelerate_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.settings.registry.find_spec", lambda name: None if name == "accelerate" else name)
    message = re.escape("a callback of transformers needs the package accelerate: pip install 'agentrl-gym[track]'")
    with pytest.raises(UserError, match=message):
        adapt_callbacks([EarlyStoppingCallback(1)])
    assert adapt_callbacks([]) == []
