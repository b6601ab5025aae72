"""The sampling that a client of a served policy asks for: its own words, and the run's for what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.renderer.stop_strings import StopStrings
from agentrl.types import SamplingParams

_MOST_TOKENS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_STOPS = ("stop", "stop_sequences")
_NUMBERS: Mapping[str, tuple[float, float]] = {  # from, to
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-9, 100.0),
}
_NEUTRAL: Mapping[str, Sequence[object]] = {  # what need not be done
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "top_logprobs": (0,),
}


def read_sampling(
    body: Mapping[str, Any], names: Sequence[str], own: SamplingParams, decode: Callable[[Sequence[int]], str]
) -> tuple[SamplingParams, list[str]]:
    """Return the sampling of a request's turns, and the settings in it that nothing here follows.

    Args:
        names: of the settings that a request of its dialect may have.
        own: what stands for those that it leaves out.
        decode: of the policy's tokenizer, by which texts that end a turn are found.

    Raises:
        ValueError: a setting is no such thing, or one that changes what is sampled is not there, in words for clients.
    """
    given = {name: body[name] for name in names if body.get(name) is not None}
    changes: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in given.items():
        if name in _NUMBERS:
            changes[name] = _read_number(name, value, *_NUMBERS[name])
        elif name in _MOST_TOKENS:
            changes["max_tokens"] = _read_whole(name, value, 1)
        elif name == "top_k":
            changes[name] = max(_read_whole(name, value, -1), 0)
        elif name == "seed":
            changes[name] = _read_whole(name, value, -(2**63))
        elif name in _STOPS:
            texts = _read_texts(name, value)
            changes["stop"] = StopStrings(tuple(texts), decode) if texts else None
        elif name not in _NEUTRAL:
            ignored.append(name)
        elif value not in _NEUTRAL[name]:
            raise ValueError(f"{name}: {value!r:.80} is not sampled by here; leave it out")
    return replace(own, **changes), ignored


def _read_number(name: str, value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name}: {value!r:.80} is no number from {max(least, 0.0):g} to {most:g}")
    return float(value)


def _read_whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: {value!r:.80} is no whole number from {least} on")
    return value


def _read_texts(name: str, value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{name}: {value!r:.80} is neither a text nor a list of texts")
    return texts
