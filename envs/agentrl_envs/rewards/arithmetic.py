r"""The value of arithmetic as LaTeX, or a person, writes it: ``\frac{1}{2}``, ``3\frac12``, ``10^{3}``, ``2\sqrt{3}``.

Exact where it can be: a ``Fraction``. Roots and constants are floats. No letters but ``e``, so nothing is ever unknown.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

Value = Fraction | float
MAX_CHARS, MAX_DEPTH, MAX_BITS = 300, 30, 100_000  # of a text, of what is nested in it, of a power

_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{?(\d+)\}?")
_TIMES = re.compile(r"\*(?!\*)|\\(cdot|times)(?![a-zA-Z])|×|·")
_OVER = re.compile(r"/|:|\\div(?![a-zA-Z])|÷")
_POWER = re.compile(r"\^|\*\*")
_CONSTANTS: dict[str, float] = {"\\pi": math.pi, "π": math.pi, "e": math.e, "\\infty": math.inf, "∞": math.inf}


class _NoArithmetic(Exception):
    pass


def compute_value(text: str) -> Value | None:
    """Compute the arithmetic's value; ``None`` where the text is something else, or the value too large."""
    text = re.sub(r"_(\d)\s", r"_{\1}", _REPEATING.sub(_as_fraction, text))
    if len(text) > MAX_CHARS or re.search(r"[\d.]\s+[\d.]", text):
        return None
    reader = _Reader(re.sub(r"\s+", "", text))
    try:
        value = reader.sum()
        return value if reader.at == len(reader.text) and value == value else None  # no nan
    except (_NoArithmetic, ZeroDivisionError, OverflowError, ValueError):
        return None


def _as_fraction(match: re.Match[str]) -> str:
    whole, fixed, repeated = match.groups()
    nines = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    return rf"(\frac{{{int(whole + fixed + repeated or '0') - int(whole + fixed or '0')}}}{{{nines}}})"


class _Reader:
    """Reads by recursive descent; each method reads one level of the grammar from ``at`` on."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def sum(self) -> Value:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _NoArithmetic
        total = self._signed_product()
        while self._peek() in ("+", "-"):
            total = total + self._signed_product()
        self.depth -= 1
        return total

    def _signed_product(self) -> Value:
        sign = self._sign()
        return sign * self._product()

    def _sign(self) -> int:
        sign = 1
        while self._peek() in ("+", "-"):
            sign = -sign if self._next() == "-" else sign
        return sign

    def _product(self) -> Value:
        value = self._mixed()
        while True:
            if self._take(_TIMES):
                value = value * self._sign() * self._power()
            elif self._take(_OVER):
                value = value / (self._sign() * self._power())
            elif self.at < len(self.text) and self._begins_factor():
                value = value * self._power()
            else:
                return value

    def _mixed(self) -> Value:
        """A factor; of a whole number before a fraction of whole numbers, their sum: ``3\\frac{1}{2}``."""
        literal = re.compile(r"\d+(?=\\frac)").match(self.text, self.at)
        first = self._power()
        if literal is None or self.at != literal.end():
            return first
        begun, fraction = self.at, self._power()
        plain = re.fullmatch(r"\\frac(\{\d+\}|\d)(\{\d+\}|\d)", self.text[begun : self.at])
        return first + fraction if plain else first * fraction

    def _begins_factor(self) -> bool:
        rest = self.text[self.at]
        return rest in "(\\{π∞e" and not self.text.startswith("\\pm", self.at)

    def _power(self) -> Value:
        base = self._atom()
        while self._peek() == "!":
            self._next()
            base = _factorial(base)
        if not self._take(_POWER):
            return base
        sign = self._sign()
        return _raise(base, sign * (self._group() if self._peek() == "{" else self._power()))

    def _atom(self) -> Value:
        if match := _NUMBER.match(self.text, self.at):
            self.at = match.end()
            return Fraction(match[0])
        for name, constant in _CONSTANTS.items():
            after = self.text[self.at + len(name) : self.at + len(name) + 1]
            if self.text.startswith(name, self.at) and not after.isalpha():
                self.at += len(name)
                return constant
        for opening, closing in (("(", ")"), ("{", "}"), ("|", "|")):
            if self._peek() == opening:
                self._next()
                value = self.sum()
                self._expect(closing)
                return value if opening != "|" else -value if value < 0 else value
        return self._command()

    def _command(self) -> Value:
        match = re.compile(r"\\(frac|sqrt|binom|ln|log_)(?![a-zA-Z])").match(self.text, self.at)
        if match is None:
            raise _NoArithmetic
        self.at = match.end()
        if match[1] == "sqrt":
            return self._root()
        if match[1] in ("ln", "log_"):
            base = math.e if match[1] == "ln" else float(self._argument())
            return math.log(float(self._power()), base)
        one, other = self._argument(), self._argument()
        return one / other if match[1] == "frac" else _choose(one, other)

    def _root(self) -> Value:
        degree: Value = Fraction(2)
        if self._peek() == "[":
            self._next()
            degree = self.sum()
            self._expect("]")
        return _raise(self._argument(), 1 / degree)

    def _argument(self) -> Value:
        """A group in braces, or what LaTeX takes without them: one digit, one command."""
        if self._peek() == "{":
            return self._group()
        if self._peek().isdigit():
            return Fraction(self._next())
        return self._atom()

    def _group(self) -> Value:
        self._expect("{")
        value = self.sum()
        self._expect("}")
        return value

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _next(self) -> str:
        self.at += 1
        return self.text[self.at - 1 : self.at]

    def _expect(self, character: str) -> None:
        if self._next() != character:
            raise _NoArithmetic

    def _take(self, pattern: re.Pattern[str]) -> bool:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match is not None


def _raise(base: Value, exponent: Value) -> Value:
    if isinstance(base, float) or isinstance(exponent, float):
        return _real(float(base), float(exponent))
    if exponent.denominator == 1:
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if size * abs(exponent.numerator) > MAX_BITS:
            raise _NoArithmetic
        return base**exponent.numerator
    odd_root = base < 0 and exponent.denominator % 2 == 1
    root = _exact_root(abs(base) if odd_root else base, exponent.denominator)
    if root is None:
        return _real(float(base), float(exponent))
    return _raise(-root if odd_root else root, Fraction(exponent.numerator))


def _real(base: float, exponent: float) -> float:
    value = base**exponent
    if isinstance(value, complex):
        raise _NoArithmetic
    return float(value)


def _exact_root(base: Fraction, degree: int) -> Fraction | None:
    if base < 0 or degree > 64 or max(base.numerator, base.denominator) > 1 << 100:
        return None
    root = Fraction(round(base.numerator ** (1 / degree)), round(base.denominator ** (1 / degree)) or 1)
    return root if root**degree == base else None


def _factorial(value: Value) -> Value:
    if isinstance(value, float) or value.denominator != 1 or not 0 <= value <= 1000:
        raise _NoArithmetic
    return Fraction(math.factorial(value.numerator))


def _choose(n: Value, k: Value) -> Value:
    if (
        isinstance(n, float)
        or isinstance(k, float)
        or n.denominator != 1
        or k.denominator != 1
        or not 0 <= k <= n <= 1000
    ):
        raise _NoArithmetic
    return Fraction(math.comb(n.numerator, k.numerator))
