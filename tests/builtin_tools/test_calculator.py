"""The calculator: exact, quick whatever it is asked, and every refusal a message."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from time import perf_counter

import pytest
from agentrl_tools.calculator import calculator, evaluate_expression
from hypothesis import given
from hypothesis import strategies as st

from agentrl import ToolError


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(12+7)*3", "57"),
        (" 2 + 2 ", "4"),
        ("-(3-5)", "2"),
        ("+4", "4"),
        ("7//2", "3"),
        ("-7//2", "-4"),
        ("7%4", "3"),
        ("2**10", "1024"),
        ("2**-2", "0.25"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.333333333333"),
        ("1/3*3", "1"),
        ("123456789*987654321", "121932631112635269"),
        ("1_000+1", "1001"),
        ("1e3", "1000"),
    ],
)
async def test_it_computes_exactly(expression: str, result: str) -> None:
    assert await calculator(expression=expression) == result


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("2+", "not an arithmetic expression"),
        ("", "not an arithmetic expression"),
        ("007", "not an arithmetic expression"),
        ("1\x00", "null bytes|not an arithmetic expression"),
        ("x+1", "only numbers.*not 'x'"),
        ("3(4+5)", "only numbers"),
        ("1or 2", "only numbers"),
        (r"'\d'", "only numbers"),
        ("True+1", "only numbers"),
        ("1j", "only numbers"),
        ("[1]", "only numbers"),
        ("(1).real", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("2^3", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("2**0.5", "an exponent must be a small integer"),
        ("2**1000", "an exponent must be a small integer"),
        ("9**400", "too large"),
        ("1e300", "too large"),
        ("1e400", "too large"),
        ("9" * 160 + "*2", "too large"),
        ("1" * 201, "more than 200 characters"),
        ("(" * 150 + "1" + ")" * 49, "not an arithmetic expression"),
    ],
)
async def test_what_it_will_not_compute_it_tells_the_model(expression: str, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        await calculator(expression=expression)


@pytest.mark.parametrize("expression", ["9**9**9**9", "2**512**512", "-" * 190 + "1", "*".join(["9" * 12] * 15)])
async def test_nothing_takes_long(expression: str) -> None:
    begun = perf_counter()
    with suppress(ToolError):
        await calculator(expression=expression)
    assert perf_counter() - begun < 0.5


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**9), st.sampled_from("+-*/"))
def test_it_agrees_with_fractions(left: int, right: int, operation: str) -> None:
    wanted = {
        "+": Fraction(left) + right,
        "-": Fraction(left) - right,
        "*": Fraction(left) * right,
        "/": Fraction(left, right),
    }
    assert evaluate_expression(f"{left}{operation}{right}") == wanted[operation]


@given(st.text(max_size=30))
def test_no_text_breaks_it(text: str) -> None:
    with suppress(ValueError, ZeroDivisionError):
        assert isinstance(evaluate_expression(text), Fraction)


def test_the_model_is_told_how_to_call_it() -> None:
    function = calculator.schema["function"]
    assert function["name"] == "calculator"
    assert function["parameters"]["required"] == ["expression"]
    assert "(12+7)*3" in function["parameters"]["properties"]["expression"]["description"]
