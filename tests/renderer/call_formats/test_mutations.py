"""Mutated calls over all forms: none crashes the reader, takes long, invents a call or spoils the one before it."""

from __future__ import annotations

import os
import random
import re
import time
from functools import cache

import pytest

from agentrl.renderer.call_formats import CallFormat, harmony
from agentrl.types import Reply
from tests.renderer.call_formats.test_choice import GRAMMARS, TOOLS, learn, show

FORMS = (*GRAMMARS, "harmony")
GOOD = {"name": "search", "arguments": {"text": "x", "n": 1}}
OTHERS = [
    {"name": "add", "arguments": {}},
    {"name": "search", "arguments": {"text": 'a "b" <c> é\n{[(,;', "n": -7}},
    {"name": "search", "arguments": {"o": {"k": [1, None, "v", {"w": True}]}, "text": ""}},
]
PIECES = [*'"\\{}[]()<>,:=é\n\ud800', "</", "null", "NaN", "{" * 99]
LONGEST_S = 5.0  # about 1 ms


@cache
def form_of(name: str) -> CallFormat:
    if name == "harmony":
        return harmony
    form = learn(GRAMMARS[name]).form
    assert form is not None
    return form


def mutate(text: str, donor: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 2)):
        a, b = sorted(rng.choices(range(len(text) + 1), k=2))
        b = min(b, a + rng.choice((1, 3, 12, 60)))
        c, d = sorted(rng.choices(range(len(donor) + 1), k=2))
        piece = rng.choice(("", text[a:b] * 2, rng.choice(PIECES), donor[c:d], text[a:b].swapcase(), text[a:b][::-1]))
        text = text[:a] + piece + text[b:] if rng.random() < 0.9 else text[:a]
    return text


def check(name: str, text: str, reply: Reply) -> None:
    """Check that each call stands in the text, apart from the others, and that one that is read has its name there."""
    end = 0
    for call in reply.tool_calls:
        assert call.span is not None
        assert end <= call.span[0] <= call.span[1] <= len(text), (name, text)
        end = call.span[1]
        own, words = text[slice(*call.span)], re.findall("[A-Za-z]+", call.name)  # all else JSON may spell otherwise
        assert call.error is not None or all(word in own for word in words), (name, text)


def run_mutations(count: int, seed: int) -> dict[str, tuple[int, float]]:
    """Return, for each form, how many of its calls were still read, and the longest time of one."""
    rng, figures = random.Random(seed), dict[str, tuple[int, float]]()
    for name in FORMS:
        form, read, longest = form_of(name), 0, 0.0
        good, written = form.format_call(GOOD), [form.format_call(c) for c in (GOOD, *OTHERS)]
        for _ in range(count // len(FORMS)):
            text = mutate(rng.choice(written), rng.choice(written), rng)
            begun = time.perf_counter()
            reply = form.parse(text, tools=TOOLS)
            longest = max(longest, time.perf_counter() - begun)
            check(name, text, reply)
            read += sum(c.error is None for c in reply.tool_calls)
            if name not in ("bare", "list", "python"):  # there calls share one section
                calls = show(form.parse(f"{good}\n{text}", tools=TOOLS).tool_calls)
                assert calls[0] == ("search", {"text": "x", "n": 1}), (name, text)
        figures[name] = read, longest
    assert max(longest for _, longest in figures.values()) < LONGEST_S
    return figures


def test_mutated_calls() -> None:
    run_mutations(500, seed=1)


@pytest.mark.slow
def test_many_mutated_calls() -> None:
    count = int(os.environ.get("AGENTRL_MUTATED_CALLS", "5000"))
    figures = run_mutations(count, seed=2)
    print(f"\n{count:,} mutated calls over {len(FORMS)} forms: no crash, none invented")
    for name, (read, longest) in figures.items():
        print(f"{name:12}  {read:6,} calls still read  {1000 * longest:6.1f} ms at most")
