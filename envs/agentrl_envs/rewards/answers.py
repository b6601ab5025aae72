"""Rewards of a final answer: a box, a number, the whole text, a pattern."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

from agentrl import ContractError
from agentrl.rewards.functions import per_episode
from agentrl.runtime.processes import WorkerDied, call_in_process
from agentrl.types import THOUGHT_MARKS, Message, get_final_text, strip_thoughts
from agentrl_envs.rewards.notation import extract_boxed, find_stated_answer
from agentrl_envs.rewards.values import is_equal, needs_algebra, read_answer, read_gold

Completion = str | Sequence[Message]
Marks = tuple[str, str]  # what opens a thought, and what ends it
__all__ = ["Completion", "Marks", "Regex", "accuracy", "exact", "extract_boxed", "get_text", "is_same_answer"]
# A pattern is sought in a worker process: a few characters keep some busy for ever, and ``re`` lets nothing else run.
MAX_CHARS = 20_000  # of the text
CPU_S = 5.0
WALL_S = 120.0  # of a call that waits for a processor
MEMORY_BYTES = 512 << 20


def is_same_answer(answer: str, solution: str) -> bool:
    """Compare as numbers if both are numbers (``1,000`` is ``1000.0``), else as text without outer spaces."""
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


@per_episode
def accuracy(
    completions: Sequence[Completion], solution: Sequence[Any], thought_marks: Marks = THOUGHT_MARKS, **_: Any
) -> list[float | None]:
    r"""Pay 1.0 where the last ``\boxed{}`` means the same as the column ``solution``: a number, several, or words.

    A solution may be a bare answer, or one as GSM8K, MATH or DeepMath write it. ``None`` where it cannot be read, or is
    an expression such as ``x^2+1``, which takes the reward ``math``.
    """
    return [
        _judge_plainly(strip_thoughts(get_text(c), thought_marks), s)
        for c, s in zip(completions, solution, strict=True)
    ]


def _judge_plainly(text: str, solution: Any) -> float | None:
    """Return 1.0 where a text's answer is the solution, 0.0 where not, ``None`` where that takes algebra."""
    gold = read_gold(solution)
    if gold is None or needs_algebra(gold.value):
        return None
    said = find_stated_answer(text)
    answer = None if said is None else read_answer(said)
    return float(answer is not None and is_equal(answer, gold.value) is True)


@per_episode
def exact(
    completions: Sequence[Completion], solution: Sequence[Any], thought_marks: Marks = THOUGHT_MARKS, **_: Any
) -> list[float | None]:
    """Pay 1.0 where the text, without thoughts and outer spaces, is the column ``solution``; ``None`` without one."""
    said = [strip_thoughts(get_text(c), thought_marks).strip() for c in completions]
    return [None if s is None else float(t == str(s).strip()) for t, s in zip(said, solution, strict=True)]


class Regex:
    """A reward: 1.0 where a pattern is found in the text without its thoughts, within five seconds of computing.

    Args:
        pattern: as Python's ``re`` has them; ``(?s)`` and the like at its beginning. Without one, each row's is in the
            column ``pattern``.
        whole: it must match the whole text.

    Raises:
        ContractError: it is no pattern.
    """

    __name__ = "regex"
    per_episode = True

    def __init__(self, pattern: str | None = None, whole: bool = False) -> None:
        self.pattern, self.whole = pattern, whole
        if pattern is not None:
            _compiled(pattern)

    async def __call__(
        self,
        completions: Sequence[Completion],
        pattern: Sequence[str | None] | None = None,
        thought_marks: Marks = THOUGHT_MARKS,
        **_: Any,
    ) -> list[float | None]:
        if self.pattern is None and pattern is None:
            raise ContractError("reward 'regex' needs a pattern: a column `pattern`, or its setting")
        given = [self.pattern] * len(completions) if self.pattern is not None else list(pattern or ())
        said = [strip_thoughts(get_text(c), thought_marks).strip()[:MAX_CHARS] for c in completions]
        return [None if p is None else await self._find(p, text) for p, text in zip(given, said, strict=True)]

    async def _find(self, pattern: str, said: str) -> float:
        _compiled(pattern)
        try:
            found = await call_in_process(
                has_match,
                pattern,
                said,
                self.whole,
                timeout_s=WALL_S,
                cpu_s=CPU_S,
                memory_bytes=MEMORY_BYTES,
                reads_others=True,
            )
        except (TimeoutError, WorkerDied, MemoryError):
            return 0.0
        return float(found is True)


def has_match(pattern: str, text: str, whole: bool) -> bool:
    """Return True if a pattern is found in a text; with ``whole``, if it matches all of it."""
    compiled = _compiled(pattern)
    return (compiled.fullmatch(text) if whole else compiled.search(text)) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ContractError(f"reward 'regex': {pattern!r} is no pattern: {error}") from None


def get_text(completion: Completion) -> str:
    """Return a string as it is; of messages, the last one of the assistant."""
    return completion if isinstance(completion, str) else get_final_text(completion)
