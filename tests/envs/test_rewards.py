"""Rewards read the final answer, whatever was said before it."""

from __future__ import annotations

from typing import Any

import pytest
from agentrl_envs.rewards import accuracy, extract_boxed, is_same_answer, soft_overlong_punishment, think_format
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"It is \boxed{42}.", "42"),
        (r"\boxed{1} no, \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{}", ""),
        (r"\boxed{4", None),
        (r"\boxed{1} or \boxed{2", None),
        ("42", None),
        ("", None),
    ],
)
def test_boxed_takes_the_last_one_with_its_braces(text: str, found: str | None) -> None:
    assert extract_boxed(text) == found


@given(st.text(alphabet="ab{}\\", max_size=20), st.text(alphabet="ab ", max_size=10))
def test_boxed_finds_what_was_boxed(before: str, answer: str) -> None:
    assert extract_boxed(before + "\\boxed{" + answer + "}") == answer.strip()


@pytest.mark.parametrize(
    ("answer", "solution", "equal"),
    [
        ("42", "42", True),
        ("42.0", "42", True),
        ("+42", " 42 ", True),
        ("1,000", "1000.0", True),
        ("$5", "5", True),
        (".5", "0.50", True),
        ("-3", "3", False),
        ("1,00", "100", False),
        ("x+1", "x+1", True),
        ("x + 1", "x+1", False),
        ("nan", "nan", True),
        ("1e3", "1000", False),
        ("", "0", False),
        ("12345678901234567891", "12345678901234567890", False),
    ],
)
def test_same_number_or_same_text(answer: str, solution: str, equal: bool) -> None:
    assert is_same_answer(answer, solution) is is_same_answer(solution, answer) is equal


def chat(*said: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text} for text in said]


def test_accuracy_reads_the_final_answer() -> None:
    completions: list[Any] = [
        r"\boxed{7}",
        r"<think>\boxed{7}</think>\boxed{8}",
        r"<think>\boxed{7}",
        "7",
        chat(r"\boxed{8}", r"\boxed{7}"),
        chat(r"\boxed{7}", "so it is"),
        r"\boxed{7}",
    ]
    solutions = ["7", "7", "7", "7", 7, "7", r"thus \boxed{7}"]
    assert accuracy(completions, solution=solutions) == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]


def test_a_row_without_a_solution_is_not_judged() -> None:
    assert accuracy([r"\boxed{7}", "x"], solution=[None, "7"]) == [None, 0.0]


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("<think>a\nb</think>\nanswer", True),
        (" <think></think>", True),
        ("answer", False),
        ("<think>a", False),
        ("well, <think>a</think>b", False),
        ("<think>a</think>b</think>", False),
        ("<think>a<think>b</think>c", False),
        ("<think>a</think><think>", False),
    ],
)
def test_think_format(text: str, good: bool) -> None:
    assert think_format([text, chat(text)]) == [float(good)] * 2  # type: ignore[list-item]


@given(st.integers(0, 700), st.integers(1, 512))
def test_soft_overlong_punishment_is_the_formula_of_dapo(length: int, cache: int) -> None:
    most = 512
    (found,) = soft_overlong_punishment([[0] * length], max_completion_len=most, soft_punish_cache=cache)
    if length <= most - cache:
        assert found == 0
    elif length <= most:
        assert found == pytest.approx(((most - cache) - length) / cache)
    else:
        assert found == -1
