"""Rewards of a final answer, in TRL's form: ``f(prompts, completions, **columns) -> list[float | None]``.

A completion is the model's *final* text: a string, or a list of messages, of which the last assistant one counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from agentrl.types import Message, final_text, without_thoughts

Completion = str | Sequence[Message]


def boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{...}``, braces balanced; ``None`` if there is none, or it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for i in range(begin - 1, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin:i].strip()
    return None


def same(answer: str, solution: str) -> bool:
    """Equal as numbers where both are numbers (``1,000`` is ``1000.0``), else as text without outer spaces."""
    one, other = _number(answer), _number(solution)
    return one == other if one is not None and other is not None else answer.strip() == solution.strip()


def _number(text: str) -> Decimal | None:
    plain = text.strip().removeprefix("$")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", plain):
        plain = plain.replace(",", "")
    try:
        number = Decimal(plain) if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", plain) else None
    except InvalidOperation:  # pragma: no cover - the pattern admits numbers only
        return None
    return number


def accuracy(completions: Sequence[Completion], solution: Sequence[Any], **_: Any) -> list[float | None]:
    r"""1.0 where the last ``\boxed{}`` equals the ``solution`` column; ``None`` where a row has no solution.

    A solution may be a bare answer or a text with a ``\boxed{}`` of its own.
    """
    return [_accuracy(_text(c), s) for c, s in zip(completions, solution, strict=True)]


def _accuracy(text: str, solution: Any) -> float | None:
    if solution is None:
        return None
    wanted, answer = str(solution), boxed(without_thoughts(text))
    wanted = boxed(wanted) or wanted
    return float(answer is not None and same(answer, wanted))


def think_format(completions: Sequence[Completion], **_: Any) -> list[float]:
    """1.0 where the text is ``<think>``, a thought, ``</think>`` and what follows, each tag once."""
    return [float(_thinks(_text(c))) for c in completions]


def _thinks(text: str) -> bool:
    before, *after = text.split("<think>")
    return not before.strip() and len(after) == 1 and after[0].count("</think>") == 1


def soft_overlong_punishment(
    completion_ids: Sequence[Sequence[int]], max_completion_len: int = 512, soft_punish_cache: int = 128, **_: Any
) -> list[float]:
    """0 up to ``max - cache`` tokens, then a line down to -1 at ``max`` (DAPO, arXiv 2503.14476, equation 13)."""
    free = max_completion_len - soft_punish_cache
    return [min(0.0, max(-1.0, (free - len(ids)) / soft_punish_cache)) for ids in completion_ids]


def _text(completion: Completion) -> str:
    return completion if isinstance(completion, str) else final_text(completion)


REWARDS = {"accuracy": accuracy, "think_format": think_format, "soft_overlong_punishment": soft_overlong_punishment}
