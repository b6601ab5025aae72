"""Exact arithmetic on rational numbers: small, safe, and quick enough to run in the event loop."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from fractions import Fraction
from math import isfinite

from agentrl import ToolError, tool

MAX_CHARS = 200
MAX_BITS = 512  # of a numerator or denominator: no expression can take long

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@tool
async def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers, + - * / // % ** and parentheses, such as "(12+7)*3".
    """
    try:
        return format_number(evaluate_expression(expression))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except ValueError as error:
        raise ToolError(str(error)) from None


def evaluate_expression(expression: str) -> Fraction:
    """Compute the exact value. Raises ValueError for what is no arithmetic, or too large; ZeroDivisionError."""
    if len(expression) > MAX_CHARS:
        raise ValueError(f"an expression of more than {MAX_CHARS} characters")
    try:
        with warnings.catch_warnings(action="ignore"):  # of literals that Python finds odd
            return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"not an arithmetic expression: {expression!r}") from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.BinOp(left, ast.Pow(), right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            return _bounded(Fraction(_BINARY[type(op)](_value(left), _value(right))))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.UnaryOp(ast.UAdd(), operand):
            return _value(operand)
        case ast.Constant(bool()):
            pass
        case ast.Constant(int() | float() as number):
            return _bounded(Fraction(str(number) if isfinite(number) else 2**MAX_BITS))
    raise ValueError(f"only numbers, + - * / // % ** and parentheses; not {ast.unparse(node)!r}")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_BITS:
        raise ValueError("an exponent must be a small integer")
    _bounded(Fraction(2) ** (abs(int(exponent)) * max(base.numerator.bit_length(), base.denominator.bit_length()) // 2))
    return base ** int(exponent)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("the numbers are too large")
    return value


def format_number(value: Fraction) -> str:
    """Format an integer as it is, anything else as a decimal of up to 12 digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"
