"""An episode's ``info`` as JSON of a bounded size, and the texts by which a person knows an episode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.runs.episode_info import (
    MAX_INFO,
    find_expected_answer,
    find_last_answer,
    find_question,
    jsonable_info,
    shorten_to_line,
)
from tests.helpers import runs


def test_what_json_holds_is_kept_as_it_is() -> None:
    info = {"family": "sum", "n": 3, "x": 0.5, "ok": True, "none": None, "list": [1, {"a": "b"}]}
    assert jsonable_info(info) == info


def test_what_json_does_not_hold_is_still_told() -> None:
    info: Any = {"array": np.arange(3), "n": np.int64(7), "x": np.float32(0.5), "nan": float("nan"), 3: "key"}
    kept = jsonable_info(info)
    assert kept == {"array": "<ndarray>", "n": 7, "x": 0.5, "nan": "nan", "3": "key"}
    assert jsonable_info({"path": Path(), "half": "\ud800", "huge": 10**6000})["half"] == "?"


@pytest.mark.parametrize(
    "info",
    [
        {"text": "x" * 1_000_000},
        {str(i): "x" * 100 for i in range(10_000)},
        {"deep": [[[[["x" * 500] * 64] * 64] * 64] * 64] * 64},
        {"rows": [{"a": "b" * 500}] * 100_000, "expected": "42"},
        {"k" * 100_000: 1},
    ],
)
def test_any_info_is_bounded(info: dict[str, object]) -> None:
    assert len(json.dumps(jsonable_info(info), ensure_ascii=False)) <= MAX_INFO


def test_what_is_too_long_leaves_room_for_the_others() -> None:
    kept = jsonable_info({"rows": [{"a": "b" * 500}] * 100_000, "expected": "42"})
    assert kept["expected"] == "42"


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({}, None),
        ({"answer": "12", "expected": "7"}, "7"),
        ({"expected": "", "solution": "$12$"}, "$12$"),
        ({"target": 12}, "12"),
        ({"ground_truth": ["a", 1]}, '["a", 1]'),
        ({"answer": 0}, "0"),
    ],
)
def test_the_right_answer_is_found_under_the_names_it_goes_by(info: dict[str, object], expected: str | None) -> None:
    assert find_expected_answer(info) == expected


def test_the_question_is_what_was_asked_before_the_first_turn() -> None:
    few_shot = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "4"},
    ]
    assert find_question(few_shot, 2) == "2 + 2?"  # type: ignore[arg-type]
    assert find_question(few_shot[:3], 0) == "2 + 2?"  # type: ignore[arg-type]
    assert find_question([{"role": "system", "content": "be"}], 0) == ""


def test_the_answer_is_what_was_said_last_or_the_calls_it_ended_with() -> None:
    assert find_last_answer(runs.solved(7)) == "The answer is 49."
    assert find_last_answer(runs.stuck(7)) == "\u2192 catalogue"
    assert find_last_answer(runs.lost(7)) == ""


def test_a_line_keeps_the_beginning_or_the_end() -> None:
    assert shorten_to_line(None) is None
    assert shorten_to_line("a\n b\t c") == "a b c"
    long = "begin " + "x" * 100_000 + " end"
    assert str(shorten_to_line(long)).startswith("begin ")
    assert str(shorten_to_line(long, end=True)).endswith(" end")
    assert len(str(shorten_to_line(long))) <= 201
