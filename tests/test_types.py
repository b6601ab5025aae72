"""The nouns: a trajectory's masks and logprobs are properties of its segments, and a reward is never made up."""

from __future__ import annotations

import subprocess
import sys
from math import isnan
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentrl
from agentrl.types import (
    Author,
    Fault,
    Group,
    Message,
    Reply,
    Segment,
    Stop,
    ToolCall,
    Trajectory,
    get_final_text,
    strip_thoughts,
    to_utf8,
    to_utf8_json,
)

TOKENS = st.lists(st.integers(0, 999), max_size=6).map(tuple)


@st.composite
def segments(draw: st.DrawFn) -> tuple[Segment, ...]:
    row = []
    for author in draw(st.lists(st.sampled_from(get_args(Author)), max_size=8)):
        ids = draw(TOKENS)
        if author == "model":
            row.append(Segment("model", ids, tuple(-0.5 - i for i in range(len(ids))), (7,) * len(ids)))
        else:
            row.append(Segment(author, ids))
    return tuple(row)


def played(*row: Segment, said: str = "", **more: object) -> Trajectory:
    messages: tuple[Message, ...] = ({"role": "user", "content": "?"}, {"role": "assistant", "content": said})
    return Trajectory(0, row, messages, Stop.TERMINATED, **more)  # type: ignore[arg-type]


@given(segments())
def test_masks_and_logprobs_follow_the_segments(row: tuple[Segment, ...]) -> None:
    t = played(*row)
    assert len(t.token_ids) == len(t.loss_mask) == len(t.logprobs) == len(t.versions)
    at = 0
    for segment in row:
        for offset, token in enumerate(segment.token_ids):
            assert t.token_ids[at] == token
            if segment.logprobs is not None and segment.versions is not None:
                assert (t.loss_mask[at], t.logprobs[at], t.versions[at]) == (1, segment.logprobs[offset], 7)
            else:
                assert (t.loss_mask[at], t.logprobs[at], t.versions[at]) == (0, 0.0, -1)
            at += 1
    assert t.sampled_tokens == sum(t.loss_mask)
    assert t.turns == sum(s.author == "model" for s in row)


def test_a_segment_that_does_not_fit_together_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="logprobs and versions go together"):
        Segment("model", (1, 2), (-0.5, -0.5))
    with pytest.raises(ValueError, match="do not go together"):
        Segment("env", (1,), (-0.5,), (0,))
    with pytest.raises(ValueError, match="1 values for 2 tokens"):
        Segment("model", (1, 2), (-0.5,), (0, 0))


def test_what_no_engine_sampled_has_no_logprobs_and_is_counted_as_a_demonstration() -> None:
    written = (Segment("prompt", (1,)), Segment("model", (2, 3)))
    t = Trajectory(0, written, (), Stop.TERMINATED)
    assert t.is_demonstration
    assert (t.sampled_tokens, t.own_tokens, t.loss_mask, t.versions) == (2, 0, [0, 1, 1], [-1, -1, -1])
    assert t.logprobs[0] == 0.0
    assert all(isnan(p) for p in t.logprobs[1:])


@pytest.mark.parametrize(
    ("rewards", "weights", "total"),
    [
        ({"a": 1.0, "b": 2.0}, {}, 3.0),
        ({"a": 1.0, "b": 2.0}, {"b": 0.5}, 2.0),
        ({"a": None, "b": 2.0}, {}, 2.0),
        ({"a": 0.0}, {}, 0.0),
        ({"a": None}, {}, None),
        ({}, {}, None),
    ],
)
def test_a_reward_is_the_weighted_sum_of_what_applies(
    rewards: dict[str, float | None], weights: dict[str, float], total: float | None
) -> None:
    assert played(rewards=rewards, weights=weights).reward == total


def test_the_worlds_fault_takes_the_reward() -> None:
    assert played(rewards={"a": 1.0}, fault=Fault("tool_timeout", "...")).reward is None


def test_a_group_counts_those_that_have_a_reward() -> None:
    good, bad, none = played(rewards={"a": 1.0}), played(fault=Fault("x", "")), played(rewards={"a": None})
    assert Group(0, (good, bad, none)).scored == (good,)
    assert list(Group(0, (good, bad))) == [good, bad]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("42", "42"),
        ("<think>7?</think>42", "42"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("7?</think>42", "42"),  # the template opened the thought
        ("<think>is it 42", ""),
        ("<think>a</think>42<think>or", "42"),
    ],
)
def test_the_answer_is_without_thoughts(said: str, answer: str) -> None:
    assert played(said=said).answer == strip_thoughts(said) == answer


def test_the_last_assistant_turn_counts() -> None:
    assert get_final_text([]) == ""
    assert get_final_text([{"role": "user", "content": "x"}]) == ""
    said: list[Message] = [
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "tool", "content": "x"},
    ]
    assert get_final_text(said) == "two"


def test_a_reply_is_a_message_in_the_openai_shape() -> None:
    assert Reply("hi").message() == {"role": "assistant", "content": "hi"}
    message = Reply("", (ToolCall("1", "add", {"a": 1}), ToolCall("2", "", error="no JSON"))).message()
    assert message["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "2", "type": "function", "function": {"name": "", "arguments": {}}},
    ]


@given(st.text(alphabet=st.characters(exclude_categories=[])))
def test_utf8_keeps_text_and_drops_half_characters(text: str) -> None:
    clean = to_utf8(text)
    assert len(clean.encode()) >= len(text)
    assert [a for a, b in zip(text, clean, strict=True) if a != b] == [c for c in text if 0xD800 <= ord(c) < 0xE000]


def test_text_in_json_is_cleaned_wherever_it_stands() -> None:
    given = {"a\ud800": ["b\udfff", {"c": "\ud83d\ude00"}, 1, None, True], "d": "e"}
    assert to_utf8_json(given) == {"a?": ["b?", {"c": "??"}, 1, None, True], "d": "e"}


def test_importing_agentrl_brings_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, agentrl, agentrl.rollout.rollout, agentrl.testing\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_what_the_package_does_not_have() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        agentrl.trian  # noqa: B018
