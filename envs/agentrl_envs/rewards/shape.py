"""Rewards of a text's form and length, whatever it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl import ContractError
from agentrl.rewards.functions import per_episode
from agentrl.types import THOUGHT_MARKS
from agentrl_envs.rewards.answers import Completion, Marks, get_text


@per_episode
def think_format(completions: Sequence[Completion], thought_marks: Marks = THOUGHT_MARKS, **_: Any) -> list[float]:
    """Pay 1.0 where the text is ``<think>``, a thought, ``</think>`` and what follows, each mark once."""
    return [float(_thinks(get_text(c), *thought_marks)) for c in completions]


def _thinks(text: str, opening: str, ending: str) -> bool:
    before, *after = text.split(opening)
    return not before.strip() and len(after) == 1 and after[0].count(ending) == 1


@per_episode
def soft_overlong_punishment(
    completion_ids: Sequence[Sequence[int]], max_completion_len: int = 512, soft_punish_cache: int = 128, **_: Any
) -> list[float]:
    """Penalize length: 0 up to ``max - cache`` tokens, then down to -1 at ``max`` (DAPO, arXiv 2503.14476, eq. 13)."""
    free = max_completion_len - soft_punish_cache
    return [min(0.0, max(-1.0, (free - len(ids)) / soft_punish_cache)) for ids in completion_ids]


class Repetition:
    """A penalty for saying the same again: the share of n-grams of words that were there before, times ``-penalty``.

    After "Demystifying long chain-of-thought reasoning in LLMs" (arXiv 2502.03373), where it has a constant of its own.

    Args:
        ngram: words in an n-gram.
        penalty: of a text that only repeats itself.
    """

    __name__ = "repetition"
    per_episode = True

    def __init__(self, ngram: int = 4, penalty: float = 1.0) -> None:
        if ngram < 1 or penalty < 0:
            raise ContractError(
                f"reward 'repetition': ngram is 1 or more and penalty 0 or more; not {ngram}, {penalty}"
            )
        self.ngram, self.penalty = ngram, penalty

    def __call__(self, completions: Sequence[Completion], **_: Any) -> list[float]:
        return [-self.penalty * self._share(get_text(c).lower().split()) for c in completions]

    def _share(self, words: Sequence[str]) -> float:
        grams = [tuple(words[i : i + self.ngram]) for i in range(len(words) - self.ngram + 1)]
        return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


class Length:
    """A penalty for length: 0 up to ``free`` tokens, then a line down to ``-penalty`` at ``most``.

    Args:
        free, most: in tokens that the model sampled.
    """

    __name__ = "length"
    per_episode = True

    def __init__(self, free: int = 256, most: int = 512, penalty: float = 1.0) -> None:
        if not 0 <= free < most or penalty < 0:
            raise ContractError(
                f"reward 'length': 0 <= free < most, and penalty is 0 or more; not {free}, {most}, {penalty}"
            )
        self.free, self.most, self.penalty = free, most, penalty

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        over = [min(1.0, max(0.0, (len(ids) - self.free) / (self.most - self.free))) for ids in completion_ids]
        return [-self.penalty * o for o in over]
