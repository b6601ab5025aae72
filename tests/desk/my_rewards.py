"""Reward functions that pages name."""

from collections.abc import Sequence
from typing import Any


def exact(completions: Sequence[str], solution: Sequence[str], **columns: Any) -> list[float]:
    return [float(text.strip() == wanted) for text, wanted in zip(completions, solution, strict=True)]


async def brief(completions: Sequence[str], **columns: Any) -> list[float]:
    return [float(len(text) < 40) for text in completions]


def polite(completions: Sequence[Any], **columns: Any) -> list[float]:
    return [float("please" in str(messages).lower()) for messages in completions]
