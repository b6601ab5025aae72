"""Arithmetic questions with integer answers. A seed is a task."""

import ast
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from agentrl_envs.splits import Split, split_of

SYSTEM_PROMPT = "Answer with \\boxed{}."

# How often each family is drawn when none is asked for.
FAMILIES = {"expression": 3, "nested": 2, "word": 2, "steps": 1}

# level -> most operations, most digits of an operand
LEVELS = {1: (2, 2), 2: (3, 3), 3: (4, 4), 4: (6, 4)}
LARGEST_ANSWER = 9_999_999


@dataclass(frozen=True)
class MathTask:
    question: str
    answer: int
    expression: str  # one right way to compute the answer
    family: str


def draw(seed: int, *, split: Split, level: int = 3, families: Sequence[str] | None = None) -> MathTask:
    if level not in LEVELS:
        raise ValueError(f"level is 1 to {max(LEVELS)}, not {level}")
    names = list(families) if families is not None else list(FAMILIES)
    if not names or any(name not in FAMILIES for name in names):
        raise ValueError(f"families are some of {', '.join(FAMILIES)}; not {names}")
    rng = random.Random(f"math/{seed}/{split}/{level}/{','.join(names)}")
    family = rng.choices(names, [FAMILIES[name] for name in names])[0]
    while True:
        question, expression = _WRITERS[family](rng, *LEVELS[level])
        if split_of(expression) != split:
            continue
        answer = evaluate(expression)
        if answer.denominator == 1 and abs(answer) <= LARGEST_ANSWER:
            return MathTask(question, int(answer), expression, family)


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(expression: str) -> Fraction:
    """The exact value; ZeroDivisionError, or ValueError for anything but + - * / on integers."""

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.Constant(int() as number):
                return Fraction(number)
        raise ValueError(f"not arithmetic: {expression!r}")

    try:
        return value(ast.parse(expression, mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"not an expression: {expression!r}") from error


# Numbers


def _number(rng: random.Random, digits: int) -> int:
    """Every length is as likely as the next, up to `digits`; never 0 or 1."""
    length = rng.randint(1, digits)
    return rng.randint(max(2, 10 ** (length - 1)), 10**length - 1)


def _small(rng: random.Random) -> int:
    return rng.randint(2, 30)


def _quotient(rng: random.Random, digits: int) -> tuple[int, int]:
    """A dividend of at most `digits` digits and an exact divisor."""
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
    """A sum in parentheses, wrapped in further operations from the inside out."""
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
    value = evaluate(inner)
    divisors = [d for d in range(2, 31) if value and value % d == 0]
    if divisors and rng.random() < 0.4:
        return f"{inner}/{rng.choice(divisors)}"
    return rng.choice(("{inner}*{n}", "{n}*{inner}")).format(inner=inner, n=_small(rng))


# Word problems. a, b, c: any number; s, t: small numbers; m: a multiple of s.

_NAMES = ("Mia", "Tom", "Ada", "Leo", "Eva", "Sam", "Ida", "Max", "Zoe", "Ben", "Ana", "Kim")
_ITEMS = ("apples", "coins", "books", "cards", "eggs", "pens", "stamps", "shells", "beads", "cups")
_WORDS = (
    ("{name} has {a} {items} and buys {b} more. How many {items} does {name} have now?", "{a}+{b}"),
    ("{name} had {a} {items} and gave {b} away. How many {items} are left?", "{a}-{b}"),
    ("There are {a} boxes with {s} {items} in each. How many {items} is that?", "{a}*{s}"),
    ("{name} shares {m} {items} among {s} friends. How many does each get?", "{m}/{s}"),
    ("What is {a} taken from {b}?", "{b}-{a}"),
    ("Add {a} to {b}.", "{b}+{a}"),
    ("{name} buys {s} bags of {a} {items} and finds {b} more. How many {items} is that?", "{s}*{a}+{b}"),
    ("{name} had {a} {items}, lost {b} and then won {c}. How many {items} now?", "{a}-{b}+{c}"),
    ("A shop has {a} red and {b} blue {items}, at {s} coins each. What do all cost?", "({a}+{b})*{s}"),
    ("{name} has {a} {items}, eats {b} and puts the rest in {s} bags. How many per bag?", "({a}-{b})/{s}"),
    ("Add {a} to {b}, then multiply by {s}.", "({b}+{a})*{s}"),
    ("Take {a}, subtract {b} and divide by {s}.", "({a}-{b})/{s}"),
    ("Multiply {a} by {s} and subtract {b}.", "{a}*{s}-{b}"),
    ("Divide {m} by {s} and add {b}.", "{m}/{s}+{b}"),
    ("{name} sells {s} {items} at {a} coins and {t} hats at {b} coins. How many coins?", "{s}*{a}+{t}*{b}"),
    ("{a}, {b} and {c} {items} are shared by {s} friends. How many each?", "({a}+{b}+{c})/{s}"),
    ("{name} had {a} {items}, sold {b}, then doubled the rest and got {c}. How many?", "({a}-{b})*2+{c}"),
    ("Add {a} to {b}, multiply by {s}, then subtract {c}.", "({b}+{a})*{s}-{c}"),
    ("Take {a}, subtract {b}, multiply by {s} and add {c}.", "({a}-{b})*{s}+{c}"),
    ("{s} rows of {a} seats and {t} rows of {b}; {c} are taken. How many are free?", "{s}*{a}+{t}*{b}-{c}"),
)


def _operations(expression: str) -> int:
    return sum(expression.count(sign) for sign in "+-*/")


def _word(rng: random.Random, most: int, digits: int) -> tuple[str, str]:
    text, form = rng.choice([pair for pair in _WORDS if _operations(pair[1]) <= most])
    while True:
        multiple, divisor = _quotient(rng, digits)
        small = divisor if "{m}" in form else _small(rng)
        a, b, c = (_number(rng, digits) for _ in "abc")
        numbers = {"a": a, "b": b, "c": c, "m": multiple, "s": small, "t": _small(rng)}
        expression = form.format(**numbers)
        answer = evaluate(expression)
        if answer.denominator == 1 and answer >= 0:
            return text.format(name=rng.choice(_NAMES), items=rng.choice(_ITEMS), **numbers), expression


# Steps. The embedded policy has never seen this family.


def _steps(rng: random.Random, most: int, digits: int) -> tuple[str, str]:
    start = _number(rng, digits)
    text, question, is_sum = str(start), f"Start with {start}.", False
    for _ in range(rng.randint(1, min(most, 3))):
        verb = rng.choice(("Add", "Subtract", "Multiply by", "Divide by"))
        if verb in ("Add", "Subtract"):
            n = _number(rng, digits)
            text, is_sum = f"{text}{'+' if verb == 'Add' else '-'}{n}", True
        else:
            value = evaluate(text)
            divisors = [d for d in range(2, 31) if value and value % d == 0]
            verb = verb if divisors else "Multiply by"
            n = rng.choice(divisors) if verb == "Divide by" else _small(rng)
            text = f"({text})" if is_sum else text
            text, is_sum = f"{text}{'/' if verb == 'Divide by' else '*'}{n}", False
        question += f" {verb} {n}."
    return question + " What do you get?", text


_WRITERS: dict[str, Callable[[random.Random, int, int], tuple[str, str]]] = {
    "expression": _flat,
    "nested": _nested,
    "word": _word,
    "steps": _steps,
}
