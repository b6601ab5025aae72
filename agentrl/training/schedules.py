"""Schedules of the learning rate: the share of its peak that a step has."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi

from agentrl.settings.schema import TrainConfig

LOWEST = 0.1  # share of the peak that a schedule ends at

SCHEDULES: dict[str, Callable[[float], float]] = {  # of the share of the steps after the warm-up that are done
    "constant": lambda done: 1.0,
    "linear": lambda done: max(LOWEST, 1.0 - done),
    "cosine": lambda done: LOWEST + (1.0 - LOWEST) * 0.5 * (1 + cos(pi * done)),
}


def scale_lr(step: int, config: TrainConfig) -> float:
    """Return the share of the peak learning rate at a step: a linear warm-up, then the schedule that is set."""
    c = config.learner
    if step <= c.warmup_steps:
        return step / (c.warmup_steps + 1)
    return SCHEDULES[c.lr_scheduler]((step - 1 - c.warmup_steps) / max(config.steps - c.warmup_steps, 1))
