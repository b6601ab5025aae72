"""Rewards in TRL's form: ``f(prompts, completions, **columns) -> list[float | None]``; functions, or objects to call.

A completion is the model's *final* text: a string, or a list of messages, of which the last assistant one counts.
"""

from __future__ import annotations

from agentrl_envs.rewards.answers import Completion, Regex, accuracy, exact, extract_boxed, is_same_answer
from agentrl_envs.rewards.gates import apply_gate
from agentrl_envs.rewards.judge import Judge
from agentrl_envs.rewards.mathematics import math
from agentrl_envs.rewards.programs import Code
from agentrl_envs.rewards.scaled import CosineScaled, ReasoningAccuracy
from agentrl_envs.rewards.shape import Length, Repetition, soft_overlong_punishment, think_format

__all__ = [
    "Code",
    "Completion",
    "CosineScaled",
    "Judge",
    "Length",
    "ReasoningAccuracy",
    "Regex",
    "Repetition",
    "accuracy",
    "apply_gate",
    "exact",
    "extract_boxed",
    "is_same_answer",
    "math",
    "soft_overlong_punishment",
    "think_format",
]
