"""A tokenizer's file, ``tokenizer.json``: whether texts stay of a size as it reads and writes them.

A rule that puts ten characters in the place of each one, nine times over, makes a text of a gigabyte of a word. The
library that follows the rules has no bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_GROWTH = 64  # times as long as it was is a text at most after all rules
MAX_TOKEN_CHARS = 10_000
MAX_ADDED_TOKENS = 50_000  # read one by one, of each model; codecs of speech add some 30,000
_MAX_TEMPLATE_PARTS = 64


def check_tokenizer(tokenizer: Mapping[str, Any]) -> None:
    """Raise ValueError if the rules of a tokenizer may make a text endless, or its added tokens are too many."""
    check_added_tokens(tokenizer.get("added_tokens"))
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growth = 1
        for rule in _list_rules(tokenizer.get(part)):
            growth *= _estimate_growth(rule)
            if growth > MAX_GROWTH:
                raise ValueError(f"its {part} makes texts more than {MAX_GROWTH} times as long")
    for rule in _list_rules(tokenizer.get("post_processor")):
        for name in ("single", "pair"):
            if isinstance(template := rule.get(name), list) and len(template) > _MAX_TEMPLATE_PARTS:
                raise ValueError(f"its post_processor repeats a text: {name} has {len(template):,} parts")
    longest = max(map(len, _list_tokens(tokenizer)), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise ValueError(f"a token has {longest:,} characters, more than {MAX_TOKEN_CHARS:,}")


def check_added_tokens(added: Any) -> None:
    """Raise ValueError if a list or a table of tokens that are added to a vocabulary is too long."""
    if isinstance(added, list | dict) and len(added) > MAX_ADDED_TOKENS:
        raise ValueError(f"it adds {len(added):,} tokens to its vocabulary, more than {MAX_ADDED_TOKENS:,}")


def _list_rules(rule: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a rule, or those that it is a sequence of."""
    waiting = [rule]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += reversed(one)
        elif isinstance(one, dict):
            yield one
            waiting += [one.get(name) for name in ("processors", "decoders", "pretokenizers", "normalizers")]


def _estimate_growth(rule: Mapping[str, Any]) -> int:
    """Return how many times as long a text may be after a rule."""
    content, pattern = rule.get("content"), rule.get("pattern")
    if rule.get("type") == "Prepend":
        return 1 + len(str(rule.get("prepend", ""))) // 16
    if rule.get("type") != "Replace" or not isinstance(content, str):
        return 1
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    least = max(1, len(replaced)) if isinstance(replaced, str) else 1
    return max(1, -(-len(content) // least))


def _list_tokens(tokenizer: Mapping[str, Any]) -> Iterator[str]:
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from vocabulary
    elif isinstance(vocabulary, list):
        yield from (str(entry[0]) for entry in vocabulary if isinstance(entry, list) and entry)
    added = tokenizer.get("added_tokens")
    yield from (str(t.get("content", "")) for t in added if isinstance(t, dict)) if isinstance(added, list) else ()
