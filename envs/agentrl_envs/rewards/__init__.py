"""Rewards in TRL's form: ``f(prompts, completions, **columns) -> list[float | None]``; functions, or objects to call.

A completion is the model's *final* text: a string, or a list of messages, of which the last assistant one counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrl_envs.rewards.answers import Completion, Regex, accuracy, boxed, exact, same
from agentrl_envs.rewards.gates import gated
from agentrl_envs.rewards.judge import Judge
from agentrl_envs.rewards.mathematics import math
from agentrl_envs.rewards.programs import Code
from agentrl_envs.rewards.shape import Length, Repetition, soft_overlong_punishment, think_format

Reward = Callable[..., Any]

# By name; a class is made with its settings: --env.reward_settings.NAME.SETTING value
REWARDS: dict[str, Reward] = {
    "accuracy": accuracy,
    "exact": exact,
    "math": math,
    "regex": Regex,
    "code": Code,
    "judge": Judge,
    "think_format": think_format,
    "repetition": Repetition,
    "length": Length,
    "soft_overlong_punishment": soft_overlong_punishment,
}

__all__ = [
    "REWARDS",
    "Code",
    "Completion",
    "Judge",
    "Length",
    "Regex",
    "Repetition",
    "Reward",
    "accuracy",
    "boxed",
    "exact",
    "gated",
    "math",
    "same",
    "soft_overlong_punishment",
    "think_format",
]
