"""Small functions to write. A seed is a task; a task is a family and its parameters."""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.environments.task_sampler import task_index
from agentrl_envs.splits import Split, assign_split

SYSTEM_PROMPT = "Write Python. Your last message holds the function in a block between lines of ```python and ```."

Params = tuple[int, ...]


@dataclass(frozen=True)
class _CodeTask:
    question: str
    function: str
    solution: str  # source
    tests: tuple[tuple[list[Any], Any], ...]  # arguments and result, as JSON has them
    family: str


@dataclass(frozen=True)
class _CodeFamily:
    """A family of tasks. ``text`` and ``body`` have the parameters as ``{0}``, ``{1}``; a body is of ``def f(x):``."""

    text: str
    body: str
    params: Sequence[tuple[int, int]]  # the range of each
    given: Callable[[random.Random], Any]


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-99, 99) for _ in range(rng.randint(0, 9))]


def _number(rng: random.Random) -> int:
    return rng.randint(0, 10 ** rng.randint(1, 6))


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefgh xyzAB") for _ in range(rng.randint(0, 12)))


def _brackets(rng: random.Random) -> str:
    """Draw brackets, balanced half of the time, of any depth; else with one too few, or another in its place."""
    text = _nested(rng, rng.randint(1, 8))
    if rng.random() < 0.5:
        return text
    place = rng.randrange(len(text))
    return text[:place] + rng.choice(["", *(c for c in "()[]" if c != text[place])]) + text[place + 1 :]


def _nested(rng: random.Random, pairs: int) -> str:
    if pairs == 0:
        return ""
    inside = rng.choice([pairs - 1, rng.randrange(pairs)])
    brackets = rng.choice(["()", "[]"])
    return brackets[0] + _nested(rng, inside) + brackets[1] + _nested(rng, pairs - 1 - inside)


FAMILIES = {
    "digits": _CodeFamily(
        "returns the sum of the digits of the whole number x, written in base {0}, times {1}",
        "    total = 0\n    while x:\n        total += x % {0}\n        x //= {0}\n    return total * {1}",
        [(2, 16), (1, 9)],
        _number,
    ),
    "shift": _CodeFamily(
        "moves each lowercase letter of the text x by {0} places in the alphabet, around its end, and leaves the rest",
        "    return ''.join(chr((ord(c) - 97 + {0}) % 26 + 97) if 'a' <= c <= 'z' else c for c in x)",
        [(1, 25)],
        _word,
    ),
    "rotate": _CodeFamily(
        "returns the list x rotated by {0} places to the left, its elements plus {1}",
        "    k = {0} % len(x) if x else 0\n    return [n + {1} for n in x[k:] + x[:k]]",
        [(1, 9), (-9, 9)],
        _numbers,
    ),
    "runs": _CodeFamily(
        "returns the runs of equal characters of the text x, as a list of [character, length], of those that have "
        "a length of {0} or more",
        "    found = []\n    for c in x:\n        if found and found[-1][0] == c:\n            found[-1][1] += 1\n"
        "        else:\n            found.append([c, 1])\n    return [r for r in found if r[1] >= {0}]",
        [(1, 4)],
        lambda rng: "".join(c * rng.randint(1, 5) for c in _word(rng)[:5]),
    ),
    "multiples": _CodeFamily(
        "returns the sum of the numbers of the list x at whose place, counted from 0, the remainder by {0} is {1}",
        "    return sum(n for i, n in enumerate(x) if i % {0} == {1})",
        [(2, 5), (0, 1)],
        _numbers,
    ),
    "window": _CodeFamily(
        "returns the largest sum of {0} neighbours in the list x, times {1}, or None where there are not that many",
        "    sums = [sum(x[i:i + {0}]) * {1} for i in range(len(x) - {0} + 1)]\n    return max(sums) if sums else None",
        [(1, 5), (1, 5)],
        _numbers,
    ),
    "collatz": _CodeFamily(
        "counts how many steps the whole number x takes to 1, or to 0, where n becomes n / 2 if even, else 3 n + 1, "
        "but {0} at most, times {1}",
        "    steps = 0\n    while x > 1 and steps < {0}:\n        x = x // 2 if x % 2 == 0 else 3 * x + 1\n"
        "        steps += 1\n    return steps * {1}",
        [(5, 99), (1, 9)],
        _number,
    ),
    "balanced": _CodeFamily(
        "tells whether the brackets () and [] in the text x are balanced, and nested no deeper than {0}",
        "    stack = []\n    for c in x:\n        if c in '([':\n            stack.append(c)\n"
        "            if len(stack) > {0}:\n                return False\n"
        "        elif not stack or stack.pop() + c not in ('()', '[]'):\n            return False\n"
        "    return not stack",
        [(1, 6)],
        _brackets,
    ),
    "columns": _CodeFamily(
        "cuts the list x into rows of {0}, the last one may be shorter, and returns the sums of the rows plus {1}",
        "    return [sum(x[i:i + {0}]) + {1} for i in range(0, len(x), {0})]",
        [(1, 6), (-9, 9)],
        _numbers,
    ),
    "between": _CodeFamily(
        "returns the different numbers of the list x from {0} to {1}, both included, in falling order",
        "    return sorted({{n for n in x if {0} <= n <= {1}}}, reverse=True)",
        [(-60, 0), (1, 60)],
        _numbers,
    ),
}

SHOWN, HIDDEN = 2, 10
ALIKE = 6  # hidden tests with one result, at most: a constant fails the others
TRIES = 1_000


def draw(seed: int, *, split: Split) -> _CodeTask:
    rng = random.Random(f"code/{task_index(seed)}/{split}")
    while True:
        name = rng.choice(list(FAMILIES))
        family = FAMILIES[name]
        params = tuple(rng.randint(low, high) for low, high in family.params)
        if assign_split(f"{name}{params}") == split:
            return _made(name, family, params, rng)


def _made(name: str, family: _CodeFamily, params: Params, rng: random.Random) -> _CodeTask:
    function = f"{name}_{rng.randint(1, 99)}"
    solution = f"def {function}(x):\n{family.body.format(*params)}\n"
    names: dict[str, Any] = {}
    exec(solution, names)
    tests = _varied(lambda g: json.loads(json.dumps(names[function](g))), family, rng)
    shown = "\n".join(f"{function}({g[0]!r}) is {r!r}" for g, r in tests[:SHOWN])
    question = f"Write a function `{function}(x)` that {family.text.format(*params)}. For example:\n{shown}"
    return _CodeTask(question, function, solution, tests[SHOWN:], name)


def _varied(solve: Callable[[Any], Any], family: _CodeFamily, rng: random.Random) -> tuple[tuple[list[Any], Any], ...]:
    """Draw the tests, hidden after shown; of the hidden ones at most `ALIKE` have the same result.

    A family with fewer results than that takes would be drawn from for ever, which is an error of its own.
    """
    tests = [([given], solve(given)) for given in (family.given(rng) for _ in range(SHOWN))]
    results: Counter[str] = Counter()
    for _ in range(TRIES):
        given = family.given(rng)
        result = solve(given)
        if results[json.dumps(result)] < ALIKE:
            results[json.dumps(result)] += 1
            tests.append(([given], result))
        if len(tests) == SHOWN + HIDDEN:
            return tuple(tests)
    raise ValueError(f"{TRIES} draws of a family gave too few different results: {results}")
