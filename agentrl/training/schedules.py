"""Schedules of the learning rate: by a name of transformers, or a torch scheduler of the user's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from math import ceil
from typing import Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler

from agentrl.errors import ConfigError, UserError, author_errors
from agentrl.learner.learner import Learner
from agentrl.learner.optimizers import OptimizerSource
from agentrl.models.hub import silence_libraries
from agentrl.settings.names.translation import find_name
from agentrl.settings.schema import TrainConfig

SchedulerStates = list[dict[str, object]]
SchedulerSource = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler]
OptimizerPair = tuple[OptimizerSource | None, SchedulerSource | None]  # as ``train(optimizers=...)`` takes them


class _Schedule(Protocol):
    """The learning rates of a run, step by step. A checkpoint holds its `state`."""

    def before(self, step: int, share: float = 1.0) -> None:
        """Set the rates of a step: so much of what the schedule gives, in a stage with a rate of its own."""

    def after(self) -> None:
        """Go on, once the step's update is made."""

    def state(self) -> SchedulerStates | None: ...
    def load(self, state: SchedulerStates | None) -> None: ...


_BY_OPTIMIZER = ("optimizer", "optimizer_args", "lr", "weight_decay", "betas", "adam_epsilon")
_BY_SCHEDULER = ("lr_scheduler", "lr_scheduler_args", "warmup_steps", "warmup_ratio")


def check_optimizers(optimizers: OptimizerPair, settings: Mapping[str, object]) -> None:
    """Refuse what is no pair, and settings that an optimizer or a scheduler of the user's own leaves without effect.

    Raises:
        ConfigError: the sentence names the setting.
    """
    if not isinstance(optimizers, tuple) or len(optimizers) != 2:
        raise ConfigError(f"optimizers is a pair, (optimizer, scheduler), either of them None, not {optimizers!r:.80}")
    learner = settings.get("learner")
    own = {*learner} if isinstance(learner, Mapping) else set()
    own |= {e.setting.removeprefix("learner.") for name in settings if (e := find_name(name))}
    for source, names, what in zip(optimizers, (_BY_OPTIMIZER, _BY_SCHEDULER), ("optimizer", "scheduler"), strict=True):
        given = [n for n in names if n in own]
        if source is not None and given:
            raise ConfigError(f"learner.{given[0]} does nothing where optimizers= brings the {what}: set it there")
    stages = settings.get("stages")
    learners = [s.get("learner") for s in stages if isinstance(s, Mapping)] if isinstance(stages, list | tuple) else []
    if optimizers[1] is not None and any(isinstance(own, Mapping) and "lr" in own for own in learners):
        raise ConfigError("a stage's learner.lr does nothing where optimizers= brings the scheduler: set it there")


def compute_lr_scale(config: TrainConfig) -> Callable[[int], float]:
    """Return the function from a step to the share of the peak learning rate it has, as transformers' schedulers do.

    Steps count from 1, so that the last one has what is left of a rate that falls to 0, and the first one of a warm-up
    has 0.

    Raises:
        ConfigError: the scheduler does not take its settings.
    """
    silence_libraries()  # the import below loads bitsandbytes, which speaks of a kernel that is not used here
    from transformers import get_scheduler

    c = config.learner
    warmup = ceil(config.steps * c.warmup_ratio) or c.warmup_steps
    name = "constant_with_warmup" if c.lr_scheduler == "constant" else c.lr_scheduler  # which is the same without one
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=c.lr)
    own = c.lr_scheduler_args
    try:
        if own and name == "constant_with_warmup":
            raise ValueError("it has no settings")
        scheduler = get_scheduler(name, optimizer, warmup, config.steps, own)
        (scale,) = scheduler.lr_lambdas
        scale(0)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{k} = {v!r}" for k, v in own.items()) or "none"
        raise ConfigError(f"learner.lr_scheduler_args of {c.lr_scheduler}: {error}; given: {given}") from None
    return lambda step: float(scale(step - 1))


class _NamedSchedule:
    """A schedule that the settings name. It is a function of the step: a resumed run heeds a change of them."""

    def __init__(self, config: TrainConfig, learner: Learner) -> None:
        self._scale, self._learner = compute_lr_scale(config), learner

    def before(self, step: int, share: float = 1.0) -> None:
        self._learner.set_lr(share * self._scale(step))

    def after(self) -> None:
        pass

    def state(self) -> None:
        return None

    def load(self, state: SchedulerStates | None) -> None:
        if state is not None:
            raise UserError("the checkpoint has the state of a scheduler: pass it again, optimizers=(..., scheduler)")


class _OwnSchedule:
    """Torch schedulers that the user passes, one for each optimizer; each step of training is one of theirs."""

    def __init__(self, source: SchedulerSource, learner: Learner) -> None:
        self._schedulers = [_adopt_scheduler(source, optimizer) for optimizer in learner.optimizers]

    def before(self, step: int, share: float = 1.0) -> None:
        pass  # `check_optimizers` has refused a share

    def after(self) -> None:
        for scheduler in self._schedulers:
            with warnings.catch_warnings():  # of a step in which nothing was learned
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                scheduler.step()

    def state(self) -> SchedulerStates:
        return [scheduler.state_dict() for scheduler in self._schedulers]

    def load(self, state: SchedulerStates | None) -> None:
        if state is None:
            raise UserError("the checkpoint is of a run without a scheduler in optimizers=: leave it out to resume")
        for scheduler, own in zip(self._schedulers, state, strict=True):
            scheduler.load_state_dict(own)


def _adopt_scheduler(source: SchedulerSource, optimizer: torch.optim.Optimizer) -> LRScheduler:
    with author_errors("optimizers[1]"):
        scheduler = source if isinstance(source, LRScheduler) or not callable(source) else source(optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise UserError(
            f"optimizers[1] is a torch scheduler, or a function of the optimizer to one, not {scheduler!r:.80}"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UserError("optimizers[1]: ReduceLROnPlateau wants a metric with each step, which none is given here")
    if scheduler.optimizer is not optimizer:
        raise UserError(
            f"optimizers[1] is the scheduler of another optimizer than the {type(optimizer).__name__} that is stepped; "
            "pass both, or a function: optimizers=(None, lambda optimizer: LambdaLR(optimizer, ...))"
        )
    return scheduler


def build_schedule(config: TrainConfig, learner: Learner, source: SchedulerSource | None = None) -> _Schedule:
    """Build the schedule that the settings name, or that of the scheduler given."""
    return _NamedSchedule(config, learner) if source is None else _OwnSchedule(source, learner)
