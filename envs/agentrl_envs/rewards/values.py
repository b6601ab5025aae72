r"""The meaning of an answer, as far as it is known without algebra: a number, several in an order or none, words.

Anything else is an `Expression`, whose worth only a computer algebra knows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

from agentrl_envs.rewards import arithmetic
from agentrl_envs.rewards.notation import find_gold_answer, strip_text_marks, tidy_answer

PLACEHOLDERS = frozenset(
    {"-", "na", "none", "null", "unknown", "proof", "notfound", "not found", "tbd", "answer", "solution"}
)  # what datasets write where there is no answer
NOTHING = frozenset({"", "?", "...", "n/a", "nan"})  # also where an answer is marked as one
FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "gcd", "lcm", "max", "min", "mod", "sqrt"}
    | {"arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"}
)
_TO_TEN = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_TO_TWENTY = ("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
NUMERALS = {word: number for number, word in enumerate((*_TO_TEN, *_TO_TWENTY, "twenty"))}
ROUNDED, RELATIVE = 5e-7, 2e-6  # decimals are compared to six places, as math-verify does
MAX_CHARS, MAX_DEPTH = 1_000, 30


@dataclass(frozen=True)
class _Number:
    """A number. ``decimal``: written as one, so perhaps rounded. ``base``: of the numerals, where one is written."""

    value: arithmetic.Value
    decimal: bool = False
    percent: bool = False
    base: int | None = None


@dataclass(frozen=True)
class _Items:
    """Several values. ``kind``: ``()``, ``[)`` and so on if they have an order, ``{}`` if none, ``matrix`` for rows."""

    kind: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class _Words:
    """Words. ``value``: of a choice such as ``(B) 42``, its meaning."""

    text: str
    value: Value | None = None


@dataclass(frozen=True)
class _Named:
    """A named value: ``x = 5``."""

    name: str
    value: Value


@dataclass(frozen=True)
class Expression:
    """LaTeX that is not understood here."""

    text: str


Value = _Number | _Items | _Words | _Named | Expression
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_UNIT = re.compile(r"(?:\\words\{[^{}]*\}|[a-zA-Z]|\s|/|\^\{?-?\d\}?|\.|²|³)+")
_LETTERS = re.compile(r"\\words\{|(?<![\\a-zA-Z])[a-zA-Z]")
_PLAIN = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_ASSIGNED = re.compile(r"(\\?[a-zA-Z]+(?:_\{?\w+\}?|'|\([a-z](?:,[a-z])*\))?)\s*(?:=|\\in(?![a-z]))\s*(.+)")
_RELATION = re.compile(r"(<|>|\\le(?![a-z])|\\ge(?![a-z])|\\lt(?![a-z])|\\gt(?![a-z]))")
_AND = re.compile(r"\\words\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|;")


def read_answer(text: str, *, marked: bool = True) -> Value | None:
    """Read the meaning of an answer; ``None`` where it is none.

    Args:
        marked: it is known to be an answer, as in a box; else several words are none.
    """
    tidied = tidy_answer(text)
    plain = strip_text_marks(tidied)
    marked = marked or "\\words" in tidied
    if plain.casefold() in NOTHING or _is_too_much(tidied) or (not marked and plain.casefold() in PLACEHOLDERS):
        return None
    value = _words(plain, marked) or _value(tidied)
    return value if value is not None else _expression(tidied, marked)


@dataclass(frozen=True)
class _Gold:
    """A solution: its meaning, and its LaTeX."""

    value: Value
    latex: str


def read_gold(solution: Any) -> _Gold | None:
    """Read the meaning of a row's solution; ``None`` where none can be read."""
    return None if solution is None else _read_gold(str(solution))


@lru_cache(maxsize=4096)
def _read_gold(solution: str) -> _Gold | None:
    text, marked = find_gold_answer(solution)
    value = read_answer(text, marked=marked)
    return None if value is None else _Gold(value, to_latex(text))


def to_latex(text: str) -> str:
    """Return an answer as LaTeX that a parser takes, without dollar signs and units."""
    return (
        _AND.sub(",", _without_unit(tidy_answer(text))).replace("\\currency", "").replace("\\words", "\\text").strip()
    )


def _words(plain: str, several: bool) -> Value | None:
    if (number := NUMERALS.get(plain.casefold())) is not None:
        return _Number(Fraction(number))
    if match := re.fullmatch(r"\(([a-zA-Z])\)[.:]?(?: +(.+))?|([A-Z])", plain):
        return _Words((match[1] or match[3]).casefold(), _value(match[2]) if match[2] else None)
    if re.fullmatch(r"[^\W\d_][^\W\d_'’-]+\.?", plain) and plain.casefold() != "infinity":
        return _Words(plain.casefold().rstrip("."))
    if several and re.fullmatch(r"[^\W\d_]{2,}(?:[ ,'’-]+[^\W_]+)+", plain):
        return _Words(" ".join(plain.casefold().split()))
    return None


def _expression(tidied: str, marked: bool) -> Value | None:
    """Return LaTeX that stays, without a unit; words between formulas are an answer only where they are marked."""
    latex = re.sub(r"\s*\\words\{[^{}]*\}(?:\^\{?\d\}?)?$", "", tidied)
    if words := set(_PLAIN.findall(_AND.sub(",", strip_text_marks(latex)))) - FUNCTIONS:
        return _Words(" ".join(strip_text_marks(tidied).casefold().split())) if marked and words else None
    return Expression(latex)


def _value(text: str) -> Value | None:
    for reader in (_number, _matrix, _bracketed, _assigned, _either_sign, _listed, _interval):
        if (value := reader(text)) is not None:
            return value
    return None


def _number(text: str) -> _Number | None:
    text = re.sub(r"^\$|\\currency ?", "", text).strip()
    text = "\\infty" if text.casefold() in ("infinity", "+infinity") else text
    text = _without_unit(text)
    percent = text.endswith("%") or text.endswith("\\words{percent}")
    text = text.removesuffix("%").removesuffix("\\words{percent}").strip()
    if match := re.fullmatch(r"([0-9A-F]+)_\{?(?:\\words\{)?(\d+)\}*", text):
        return _Number(Fraction(match[1]), base=int(match[2])) if match[1].isdigit() else None
    if match := re.fullmatch(r"([-+]?)(\d+) (\d+)/(\d+)", text):
        text = f"{match[1]}{match[2]}\\frac{{{match[3]}}}{{{match[4]}}}"
    text = re.sub(rf"^({_NUMBER})[eE]([-+]?\d{{1,3}})$", r"\1*10^{\2}", text)
    value = arithmetic.compute_value(text)
    return None if value is None else _Number(value, decimal="." in text and "overline" not in text, percent=percent)


def _without_unit(text: str) -> str:
    """``12 cm`` and ``12\\text{ cm}^2`` as ``12``; of ``12m``, which may be a product, nothing is left out."""
    match = _LETTERS.search(text)
    if match is None or not text[: match.start()].strip() or not _UNIT.fullmatch(text, match.start()):
        return text
    head, unit = text[: match.start()], text[match.start() :]
    said = unit.startswith("\\words") or (head.endswith((" ", "%")) and re.match(r"[a-zA-Z]{2,}|[a-zA-Z]/", unit))
    return head.strip() if said and "percent" not in unit else text


def _matrix(text: str) -> Value | None:
    match = re.fullmatch(r"\\begin\{([pb]matrix|array)\}(?:\{[clr|]+\})?(.+)\\end\{\1\}", text)
    if match is None:
        return None
    rows = [[_value(cell.strip()) for cell in row.split("&")] for row in match[2].split("\\\\") if row.strip()]
    if any(cell is None for row in rows for cell in row):
        return None
    return _Items("matrix", tuple(_Items("row", tuple(c for c in row if c is not None)) for row in rows))


def _bracketed(text: str) -> Value | None:
    if text in ("\\emptyset", "\\{ \\}", "\\{\\}"):
        return _Items("{}", ())
    match = re.fullmatch(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})", text)
    if match is None or not _is_balanced(match[2]):
        return None
    kind = (match[1] + match[3]).replace("\\", "")
    parts = _split(match[2], ",")
    if len(parts) == 1 and kind in ("()", "[]"):
        return _value(parts[0])
    return _items(kind, parts) if kind in ("()", "[]", "(]", "[)", "{}") else None


def _assigned(text: str) -> Value | None:
    """Of ``x = 5`` the 5; of ``x = 5, x = 3`` both, in no order."""
    parts = [part for half in _AND.split(text) for part in _split(half, ",")]
    matches = [_ASSIGNED.fullmatch(part.strip()) for part in parts if part.strip()]
    if not matches or matches[0] is None or any(m is not None and m[1] != matches[0][1] for m in matches):
        return None
    parts = [part.strip() for part in parts if part.strip()]
    rest = [part if m is None else m[2].rpartition("=")[2].strip() for part, m in zip(parts, matches, strict=True)]
    value = _value(rest[0]) if len(rest) == 1 else _items("{}", rest)
    return None if value is None else _Named(matches[0][1], value)


def _either_sign(text: str) -> Value | None:
    if text.count("\\pm") != 1 or "," in text:
        return None
    both = [_number(text.replace("\\pm", sign)) for sign in "+-"]
    return _Items("{}", tuple(n for n in both if n is not None)) if None not in both else None


def _listed(text: str) -> Value | None:
    parts = [p for half in _AND.split(text) for p in _split(half, ",")]
    parts = [p for p in parts if p.strip()]
    return _items("{}", parts) if len(parts) > 1 else None


def _items(kind: str, parts: Sequence[str]) -> Value | None:
    values = [_value(p.strip()) or _words(strip_text_marks(p.strip()), several=False) for p in parts]
    return _Items(kind, tuple(v for v in values if v is not None)) if None not in values else None


def _interval(text: str) -> Value | None:
    """``0 < x \\le 1`` as the interval that it says."""
    parts = [p.strip() for p in _RELATION.split(text)]
    if len(parts) not in (3, 5):
        return None
    signs = [p.replace("\\lt", "<").replace("\\gt", ">") for p in parts[1::2]]
    numbers = [_number(p) for p in parts[0::2]]
    names = [p for p, n in zip(parts[0::2], numbers, strict=True) if n is None]
    if len(names) != 1 or not re.fullmatch(r"\\?[a-z]+", names[0]):
        return None
    if signs[0] in (">", "\\ge"):
        numbers, signs = numbers[::-1], [{">": "<", "\\ge": "\\le"}.get(s, "?") for s in signs[::-1]]
    if any(s not in ("<", "\\le") for s in signs):
        return None
    low, high = (numbers[0], numbers[-1])
    opening = "[" if low is not None and signs[0] == "\\le" else "("
    closing = "]" if high is not None and signs[-1] == "\\le" else ")"
    return _Items(opening + closing, (low or _Number(-math.inf), high or _Number(math.inf)))


def _split(text: str, separator: str) -> list[str]:
    """Split where no bracket is open."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _is_too_much(text: str) -> bool:
    """Return True where a text is longer, or its brackets deeper, than an answer's are."""
    depths = accumulate((c in "([{") - (c in ")]}") for c in text)
    return len(text) > MAX_CHARS or max(depths, default=0) > MAX_DEPTH


def _is_balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


def is_equal(one: Value, gold: Value) -> bool | None:
    """Return True if an answer means the same as the gold; ``None`` where that takes algebra."""
    if isinstance(one, _Named) and isinstance(gold, _Named):
        return is_equal(one.value, gold.value) if one.name == gold.name else False
    if isinstance(one, _Named) or isinstance(gold, _Named):
        return is_equal(*(v.value if isinstance(v, _Named) else v for v in (one, gold)))
    if isinstance(one, _Words) or isinstance(gold, _Words):
        return _same_words(one, gold)
    if isinstance(one, Expression) or isinstance(gold, Expression):
        return True if one == gold else None
    if isinstance(one, _Number) and isinstance(gold, _Number):
        return _same_number(one, gold)
    if isinstance(one, _Items) and isinstance(gold, _Items):
        return _same_items(one, gold)
    items, other = (one, gold) if isinstance(one, _Items) else (gold, one)
    alone = isinstance(items, _Items) and items.kind == "{}" and len(items.values) == 1
    return is_equal(items.values[0], other) if isinstance(items, _Items) and alone else False


def needs_algebra(value: Value) -> bool:
    """Return True if a value contains an `Expression`."""
    if isinstance(value, _Items):
        return any(map(needs_algebra, value.values))
    return isinstance(value, Expression) or (isinstance(value, _Named) and needs_algebra(value.value))


def _same_number(one: _Number, gold: _Number) -> bool:
    if one.base and gold.base and one.base != gold.base:
        return False
    if one.percent == gold.percent:
        return _close(one.value, gold.value, one.decimal or gold.decimal)
    share, plain = (one, gold) if one.percent else (gold, one)
    decimal = one.decimal or gold.decimal
    return _close(share.value, plain.value, decimal) or _close(share.value / 100, plain.value, decimal)


def _close(one: arithmetic.Value, other: arithmetic.Value, decimal: bool) -> bool:
    if isinstance(one, Fraction) and isinstance(other, Fraction) and not decimal:
        return one == other
    try:
        a, b = float(one), float(other)
    except OverflowError:
        return one == other
    if math.isinf(a) or math.isinf(b):
        return a == b
    if one == other:
        return True
    far = abs(a - b)
    return far <= 1e-9 * max(abs(a), abs(b)) if not decimal else far <= min(ROUNDED, RELATIVE * max(abs(a), abs(b)))


def _same_words(one: Value, gold: Value) -> bool:
    words, other = (one, gold) if isinstance(one, _Words) else (gold, one)
    assert isinstance(words, _Words)
    if isinstance(other, _Words):
        return words.text == other.text
    if isinstance(other, Expression):
        return words.text == other.text.casefold()
    return words.value is not None and is_equal(words.value, other) is True


def _same_items(one: _Items, gold: _Items) -> bool:
    if len(one.values) != len(gold.values):
        return False
    if gold.kind == "{}":
        left = list(one.values) if one.kind in ("{}", "()") else []
        return len(left) == len(gold.values) and _matches(left, gold.values)
    if one.kind != gold.kind and not (one.kind == "{}" and gold.kind == "()"):
        return False
    return all(is_equal(a, b) is True for a, b in zip(one.values, gold.values, strict=True))


def _matches(left: list[Value], wanted: Sequence[Value]) -> bool:
    """Return True if each wanted value is found once."""
    for value in wanted:
        match = next((v for v in left if is_equal(v, value) is True), None)
        if match is None:
            return False
        left.remove(match)
    return True
