"""Rewards of a right answer and more: how long it took to say, and that the reasoning came to an end."""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi
from typing import Any

from agentrl import ContractError
from agentrl.types import THOUGHT_MARKS, strip_thoughts
from agentrl_envs.rewards.answers import Completion, Marks, get_text
from agentrl_envs.rewards.mathematics import judge_math


class CosineScaled:
    """A reward of mathematics, scaled by length: the shorter the better where right, the longer the better where wrong.

    From "Demystifying long chain-of-thought reasoning in LLMs" (arXiv 2502.03373), appendix C.1, as TRL has it.
    ``None`` where the column ``solution`` cannot be read.

    Args:
        max_len: tokens from which on a completion counts as the longest.
        min_value_wrong, max_value_wrong: of a wrong answer, of no token and of ``max_len``.
        min_value_correct, max_value_correct: of a right answer, of ``max_len`` tokens and of none.
    """

    __name__ = "cosine_scaled"
    per_episode = True
    needs = {"math_verify": "math"}

    def __init__(
        self,
        max_len: int,
        min_value_wrong: float = -1.0,
        max_value_wrong: float = -0.5,
        min_value_correct: float = 0.5,
        max_value_correct: float = 1.0,
    ) -> None:
        if max_len < 1:
            raise ContractError(f"reward 'cosine_scaled': max_len is 1 or more, not {max_len}")
        self.max_len = max_len
        self.wrong = (min_value_wrong, max_value_wrong)
        self.right = (max_value_correct, min_value_correct)

    async def __call__(
        self,
        completions: Sequence[Completion],
        solution: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        thought_marks: Marks = THOUGHT_MARKS,
        **_: Any,
    ) -> list[float | None]:
        texts = [strip_thoughts(get_text(c), thought_marks) for c in completions]
        verdicts = [await judge_math(text, s) for text, s in zip(texts, solution, strict=True)]
        lengths = [len(ids) for ids in completion_ids]
        return [None if v is None else self._scaled(v, n) for v, n in zip(verdicts, lengths, strict=True)]

    def _scaled(self, verdict: float, length: int) -> float:
        of_none, of_longest = self.right if verdict else self.wrong
        share = min(length / self.max_len, 1.0)
        return of_longest + 0.5 * (of_none - of_longest) * (1.0 + cos(share * pi))


class ReasoningAccuracy:
    """A reward of mathematics that pays nothing for an answer before the reasoning has ended.

    The answer is sought after the last of the first delimiter that occurs; where none does it is 0.0, as in TRL.
    ``None`` where the column ``solution`` cannot be read, whatever the answer.

    Args:
        reasoning_delimiters: what ends the reasoning.
    """

    __name__ = "reasoning_accuracy"
    per_episode = True
    needs = {"math_verify": "math"}

    def __init__(self, reasoning_delimiters: Sequence[str] = (THOUGHT_MARKS[1],)) -> None:
        if not reasoning_delimiters or not all(reasoning_delimiters):
            raise ContractError(
                f"reward 'reasoning_accuracy': reasoning_delimiters are one text or more, not {reasoning_delimiters!r}"
            )
        self.delimiters = tuple(reasoning_delimiters)

    async def __call__(
        self, completions: Sequence[Completion], solution: Sequence[Any], **_: Any
    ) -> list[float | None]:
        answers = [self._answer(get_text(c)) for c in completions]
        return [await judge_math(answer, s) for answer, s in zip(answers, solution, strict=True)]

    def _answer(self, text: str) -> str:
        delimiter = next((d for d in self.delimiters if d in text), None)
        return "" if delimiter is None else text.rpartition(delimiter)[2]
