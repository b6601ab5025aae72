"""Arithmetic questions with integer answers. A seed is a task."""

import ast
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from agentrl_tools.calculator import evaluate_expression

from agentrl.environments.task_sampler import task_index
from agentrl_envs.splits import Split, assign_split

SYSTEM_PROMPT = "Answer with \\boxed{}."

# How often each family is drawn when none is asked for.
FAMILIES = {"expression": 4, "nested": 3, "word": 3, "steps": 1}

# level -> most operations, most digits of an operand
LEVELS = {1: (2, 2), 2: (3, 3), 3: (4, 4), 4: (6, 4)}
LARGEST_ANSWER = 9_999_999


@dataclass(frozen=True)
class _MathTask:
    question: str
    answer: int
    expression: str  # one right way to compute the answer
    family: str


@dataclass(frozen=True)
class ExpressionPart:
    """A part of an expression that can be computed first: its text, and what stands before and behind it."""

    text: str
    before: str
    behind: str

    def put(self, value: str) -> str:
        """Put a value in the place of the part."""
        return f"{self.before}{f'({value})' if value.startswith('-') else value}{self.behind}"


def draw_part(rng: random.Random, expression: str) -> ExpressionPart | None:
    """Draw a part that has an operation and leaves one, in parentheses or a product; None if there is none."""
    found = []
    for node in ast.walk(ast.parse(expression, mode="eval").body):
        if isinstance(node, ast.BinOp) and node.end_col_offset is not None:
            start, end = node.col_offset, node.end_col_offset
            inside = expression[start - 1 : start] == "(" and expression[end : end + 1] == ")"
            found.append((start - inside, end + inside, expression[start:end]))
    whole = (0, len(expression))
    parts = [ExpressionPart(text, expression[:a], expression[b:]) for a, b, text in found if (a, b) != whole]
    return rng.choice(parts) if parts else None


def draw(seed: int, *, split: Split, level: int = 3, families: Sequence[str] | None = None) -> _MathTask:
    if level not in LEVELS:
        raise ValueError(f"level is 1 to {max(LEVELS)}, not {level}")
    names = list(families) if families is not None else list(FAMILIES)
    if not names or any(name not in FAMILIES for name in names):
        raise ValueError(f"families are some of {', '.join(FAMILIES)}; not {names}")
    return _drawn(seed, split, level, tuple(names))


@lru_cache(maxsize=256)  # the members of a group draw the same
def _drawn(seed: int, split: Split, level: int, names: tuple[str, ...]) -> _MathTask:
    rng = random.Random(f"math/{task_index(seed)}/{split}/{level}/{','.join(names)}")
    family = rng.choices(names, [FAMILIES[name] for name in names])[0]
    while True:
        question, expression = _WRITERS[family](rng, *LEVELS[level])
        if assign_split(expression) != split:
            continue
        answer = evaluate_expression(expression)
        if answer.denominator == 1 and abs(answer) <= LARGEST_ANSWER:
            return _MathTask(question, int(answer), expression, family)


# Numbers


def _number(rng: random.Random, digits: int) -> int:
    """Draw a number of up to `digits` digits, every length as likely; never 0 or 1."""
    length = rng.randint(1, digits)
    return rng.randint(max(2, 10 ** (length - 1)), 10**length - 1)


def _small(rng: random.Random) -> int:
    return rng.randint(2, 30)


def _quotient(rng: random.Random, digits: int) -> tuple[int, int]:
    """Draw a dividend of at most `digits` digits and an exact divisor."""
    divisor = rng.randint(2, 9 if digits < 3 else 30)
    return divisor * rng.randint(2, (10**digits - 1) // divisor), divisor


# Bare expressions

_ASK = ("What is {}?", "Compute {}.", "Calculate {}.", "How much is {}?", "Work out {}.", "Find {}.")


def _ask(rng: random.Random, expression: str) -> tuple[str, str]:
    return rng.choice(_ASK).format(expression), expression


def _term(rng: random.Random, operations: int, digits: int) -> str:
    if operations == 0:
        return str(_number(rng, digits))
    if operations == 1 and rng.random() < 0.4:
        return "{}/{}".format(*_quotient(rng, digits))
    factors = [_number(rng, digits)] + [_small(rng) for _ in range(operations)]
    rng.shuffle(factors)
    return "*".join(map(str, factors))


def _flat(rng: random.Random, most: int, digits: int) -> tuple[str, str]:
    left = rng.randint(1, most)
    text = ""
    while left >= 0:
        inside = min(left, rng.choice((0, 0, 1, 1, 2)))
        text += (rng.choice("+-") if text else "") + _term(rng, inside, digits)
        left -= inside + 1
    return _ask(rng, text)


def _nested(rng: random.Random, most: int, digits: int) -> tuple[str, str]:
    """Draw a sum in parentheses, wrapped in further operations from the inside out."""
    text, is_sum = _sum(rng, digits), True
    for _ in range(rng.randint(1, most - 1)):
        if is_sum and rng.random() < 0.2:
            text = f"{_number(rng, digits)}-({text})"
        elif is_sum:
            text, is_sum = _scaled(rng, f"({text})"), False
        elif rng.random() < 0.6:
            text, is_sum = f"{text}{rng.choice('+-')}{_number(rng, digits)}", True
        else:
            text = _scaled(rng, text)
    return _ask(rng, text)


def _sum(rng: random.Random, digits: int) -> str:
    return f"{_number(rng, digits)}{rng.choice('+-')}{_number(rng, digits)}"


def _scaled(rng: random.Random, inner: str) -> str:
    value = evaluate_expression(inner)
    divisors = [d for d in range(2, 31) if value and value % d == 0]
    if divisors and rng.random() < 0.4:
        return f"{inner}/{rng.choice(divisors)}"
    return rng.choice(("{inner}*{n}", "{n}*{inner}")).format(inner=inner, n=_small(rng))


# One operation after the other

_OPENING = {
    "+": "Add {n} to {start}",
    "-": "Subtract {n} from {start}",
    "*": "Multiply {start} by {n}",
    "/": "Divide {start} by {n}",
}
_VERBS = {"+": "add", "-": "subtract", "*": "multiply by", "/": "divide by"}


def _chain(rng: random.Random, operations: int, digits: int) -> tuple[int, list[tuple[str, int]], str]:
    """Draw a number, the operations on it (sign and operand, in order), and all of it as an expression."""
    start = _number(rng, digits)
    chain: list[tuple[str, int]] = []
    text, is_sum = str(start), False
    for _ in range(operations):
        sign = rng.choice("+-*/")
        if sign in "+-":
            n = _number(rng, digits)
            text, is_sum = f"{text}{sign}{n}", True
        else:
            value = evaluate_expression(text)
            divisors = [d for d in range(2, 31) if value and value % d == 0]
            sign = sign if divisors else "*"
            n = rng.choice(divisors) if sign == "/" else _small(rng)
            text, is_sum = f"({text}){sign}{n}" if is_sum else f"{text}{sign}{n}", False
        chain.append((sign, n))
    return start, chain, text


def _in_one_sentence(rng: random.Random, most: int, digits: int) -> tuple[str, str]:
    start, chain, expression = _chain(rng, rng.randint(1, min(most, 3)), digits)
    if rng.random() < 0.5:
        (sign, n), *chain = chain
        parts = [_OPENING[sign].format(n=n, start=start)]
    else:
        parts = [f"Take {start}"]
    parts += [f"{_VERBS[sign]} {n}" for sign, n in chain]
    *others, last = parts
    return f"{', '.join(others)} and {last}." if others else f"{last}.", expression


def _steps(rng: random.Random, most: int, digits: int) -> tuple[str, str]:
    """Draw a chain told in a sentence for each operation. The embedded policy has never seen this family."""
    operations = min(most, rng.choices((1, 2, 3), (0.45, 0.45, 0.1))[0])
    start, chain, expression = _chain(rng, operations, digits)
    sentences = [f"Start with {start}.", *(f"{_VERBS[sign].capitalize()} {n}." for sign, n in chain)]
    return f"{' '.join(sentences)} What do you get?", expression


# Word problems. a, b, c: any number; s, t: small numbers; m: a multiple of s.

_NAMES = ("Mia", "Tom", "Ada", "Leo", "Eva", "Sam", "Ida", "Max", "Zoe", "Ben", "Ana", "Kim")
_ITEMS = ("apples", "coins", "books", "cards", "eggs", "pens", "stamps", "shells", "beads", "cups")
_WORDS = (
    ("{name} has {a} {items} and buys {b} more. How many {items} does {name} have now?", "{a}+{b}"),
    ("{name} had {a} {items} and gave {b} away. How many {items} are left?", "{a}-{b}"),
    ("There are {a} boxes with {s} {items} in each. How many {items} is that?", "{a}*{s}"),
    ("{name} shares {m} {items} among {s} friends. How many does each get?", "{m}/{s}"),
    ("What is {a} taken from {b}?", "{b}-{a}"),
    ("{name} buys {s} bags of {a} {items} and finds {b} more. How many {items} is that?", "{s}*{a}+{b}"),
    ("{name} had {a} {items}, lost {b} and then won {c}. How many {items} now?", "{a}-{b}+{c}"),
    ("A shop has {a} red and {b} blue {items}, at {s} coins each. What do all cost?", "({a}+{b})*{s}"),
    ("{name} has {a} {items}, eats {b} and puts the rest in {s} bags. How many per bag?", "({a}-{b})/{s}"),
    ("{name} sells {s} {items} at {a} coins and {t} hats at {b} coins. How many coins?", "{s}*{a}+{t}*{b}"),
    ("{a}, {b} and {c} {items} are shared by {s} friends. How many each?", "({a}+{b}+{c})/{s}"),
    ("{name} had {a} {items}, sold {b}, then doubled the rest and got {c}. How many?", "({a}-{b})*2+{c}"),
    ("{s} rows of {a} seats and {t} rows of {b}; {c} are taken. How many are free?", "{s}*{a}+{t}*{b}-{c}"),
)


def _operations(expression: str) -> int:
    return sum(expression.count(sign) for sign in "+-*/")


def _word(rng: random.Random, most: int, digits: int) -> tuple[str, str]:
    if rng.random() < 0.35:
        return _in_one_sentence(rng, most, digits)
    text, form = rng.choice([pair for pair in _WORDS if _operations(pair[1]) <= most])
    while True:
        multiple, divisor = _quotient(rng, digits)
        small = divisor if "{m}" in form else _small(rng)
        a, b, c = (_number(rng, digits) for _ in "abc")
        numbers = {"a": a, "b": b, "c": c, "m": multiple, "s": small, "t": _small(rng)}
        expression = form.format(**numbers)
        answer = evaluate_expression(expression)
        if answer.denominator == 1 and answer >= 0:
            return text.format(name=rng.choice(_NAMES), items=rng.choice(_ITEMS), **numbers), expression


_WRITERS: dict[str, Callable[[random.Random, int, int], tuple[str, str]]] = {
    "expression": _flat,
    "nested": _nested,
    "word": _word,
    "steps": _steps,
}
