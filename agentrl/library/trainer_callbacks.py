"""transformers' callbacks in a run: each hears what its trainer would tell it, and its `control` is heeded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers import TrainerControl as TransformersControl
from transformers.trainer_callback import ExportableState

from agentrl.errors import ContractError
from agentrl.evaluation.measurement import Evaluation
from agentrl.resources import TrainingResources
from agentrl.rewards.trainer_state import get_trainer_state
from agentrl.runs.folder import RunFolder
from agentrl.settings.registry import check_package
from agentrl.settings.schema import TrainConfig
from agentrl.training.callbacks import Callback

NEVER_CALLED = (  # an epoch, a part of a step and a prediction are no moments of a run
    *("on_epoch_begin", "on_epoch_end", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"),
    *("on_predict", "on_prediction_step", "on_push_begin"),
)


class AdaptedCallback(Callback):
    """Calls a ``transformers.TrainerCallback``, with its own args, state and control, at the hooks that both have."""

    def __init__(self, callback: TrainerCallback) -> None:
        self.callback, self.progress, self.wishes = callback, TrainerState(), TransformersControl()
        if uncalled := [name for name in NEVER_CALLED if _overrides(callback, name)]:
            warnings.warn(
                f"{type(callback).__name__}.{uncalled[0]} is never called: a run has no such moment (docs/library.md)",
                stacklevel=3,
            )

    def on_train_begin(self, resources: TrainingResources, run: RunFolder) -> None:
        config = resources.config
        self.args = _build_arguments(config, run.folder)
        self.progress.max_steps, self.progress.train_batch_size = config.steps, self.args.per_device_train_batch_size
        self.progress.logging_steps, self.progress.save_steps = 1, config.run.save_every
        self.progress.eval_steps = config.eval.every
        self.objects = {"model": resources.policy.model, "processing_class": resources.policy.tokenizer}
        self._call("on_init_end")
        self._call("on_train_begin")

    def on_step_begin(self, step: int) -> None:
        self._reach(step - 1)
        self.wishes.should_log = self.wishes.should_evaluate = self.wishes.should_save = False
        self._call("on_step_begin")

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self._reach(step)
        self.progress.num_input_tokens_seen += int(metrics.get("num_tokens", 0))
        self._call("on_step_end")

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        logs = {**_rename(metrics), "epoch": self.progress.epoch}
        self.progress.log_history.append({**logs, "step": step})
        self._call("on_log", logs=logs)

    def on_evaluate(self, step: int, evaluation: Evaluation) -> None:
        metrics = dict(self.progress.log_history[-1])  # its row was logged just now
        del metrics["step"]
        self.wishes.should_evaluate = False
        self._call("on_evaluate", metrics=metrics)
        value, best = metrics.get(self.args.metric_for_best_model), self.progress.best_metric
        if value is not None and (best is None or (value > best if self.args.greater_is_better else value < best)):
            self.progress.best_metric, self.progress.best_global_step = value, step

    def on_save(self, step: int, checkpoint: Path) -> None:
        self.wishes.should_save = False
        self._call("on_save")

    def on_train_end(self, summary: Mapping[str, Any]) -> None:
        self._call("on_train_end")

    def state(self) -> dict[str, Any]:
        """Return the trainer's state, and what the callback itself keeps, if it exports that."""
        own = self.callback.state()["attributes"] if isinstance(self.callback, ExportableState) else {}
        return {"trainer": asdict(self.progress), "own": own}

    def load(self, state: dict[str, Any]) -> None:
        now = {name: getattr(self.progress, name) for name in ("max_steps", "eval_steps", "save_steps")}
        self.progress = TrainerState(**state["trainer"] | now)
        for name, value in state["own"].items():
            setattr(self.callback, name, value)

    def _reach(self, step: int) -> None:
        self.progress.global_step, self.progress.epoch = step, get_trainer_state().epoch

    def _call(self, hook: str, **more: Any) -> None:
        """Call a hook as the trainer does, and pass on what it wishes for.

        Raises:
            ContractError: the callback asserts something about the arguments that does not hold.
        """
        try:
            returned = getattr(self.callback, hook)(self.args, self.progress, self.wishes, **self.objects, **more)
        except AssertionError as error:
            raise ContractError(f"{type(self.callback).__name__}.{hook}: {error}") from error
        self.wishes = self.wishes if returned is None else returned
        self.control.should_training_stop |= self.wishes.should_training_stop
        self.control.should_evaluate |= self.wishes.should_evaluate
        self.control.should_save |= self.wishes.should_save


def adapt_callbacks(callbacks: Sequence[Callback | TrainerCallback]) -> list[Callback]:
    """Wrap those of transformers, whose arguments need accelerate; the others stay.

    Raises:
        UserError: accelerate is not installed, or this is no list of callbacks.
    """
    if not isinstance(callbacks, Sequence):
        raise ContractError(f"callbacks takes a list of callbacks, such as [MyCallback()], not {callbacks!r:.80}")
    if any(isinstance(c, TrainerCallback) for c in callbacks):
        check_package("a callback of transformers", "accelerate", "track")
    return [AdaptedCallback(c) if isinstance(c, TrainerCallback) else c for c in callbacks]


def _overrides(callback: TrainerCallback, name: str) -> bool:
    """Return True if a hook was written by a user; transformers' own have some that a run can do without."""
    return not getattr(type(callback), name).__module__.startswith("transformers.")


def _build_arguments(config: TrainConfig, folder: Path) -> TrainingArguments:
    """Make the arguments that say what the settings do."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps,
        per_device_train_batch_size=config.rollout.tasks_per_step * config.rollout.group_size,
        learning_rate=config.learner.lr,
        weight_decay=config.learner.weight_decay,
        max_grad_norm=config.learner.max_grad_norm,
        logging_steps=1,
        eval_strategy="steps" if config.eval.every else "no",
        eval_steps=config.eval.every or None,
        save_strategy="steps" if config.run.save_every else "no",
        save_steps=config.run.save_every or 500,
        seed=config.seed,
        metric_for_best_model=_rename_metric(config.eval.metric),
        greater_is_better=config.eval.greater_is_better,
        report_to="none",
        run_name=folder.name,
    )


def _rename(metrics: Mapping[str, float]) -> dict[str, float]:
    """Give the metrics the names that transformers' trainer logs: ``eval_reward``, ``learning_rate``."""
    return {_rename_metric(name): value for name, value in metrics.items()}


def _rename_metric(name: str) -> str:
    if name.startswith("eval/"):
        return f"eval_{name.removeprefix('eval/')}"
    return "learning_rate" if name == "lr" else name
