"""A model that talks past its tools is noticed in the first evaluation, in a sentence that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.health.tool_use import ToolUse, find_call_form
from agentrl.types import CallRecord, Stop, Trajectory


def make_episode(text: str, *statuses: Any) -> Trajectory:
    calls = tuple(CallRecord(0, "calculator", status, 0.0) for status in statuses)
    messages: Any = [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": text}]
    if calls:
        messages[-1]["tool_calls"] = [{"function": {"name": "calculator", "arguments": {}}} for _ in calls]
        messages.append({"role": "tool", "content": "invalid JSON in the tool call", "is_error": True})
    return Trajectory(task=1, messages=tuple(messages), segments=(), calls=calls, stop=next(iter(Stop)))


def explain(*episodes: Trajectory) -> str | None:
    use = ToolUse()
    for episode in episodes:
        use.add(episode)
    return use.explain("my/model")


def test_tools_that_nobody_calls_are_told_of() -> None:
    told = explain(*[make_episode("It is 42.")] * 8)
    assert told is not None
    assert "none was called in 8 episodes (the first turn: 'It is 42.')" in told
    assert "agentrl check model my/model" in told
    assert explain(*[make_episode("It is 42.")] * 7) is None


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ('[TOOL_CALLS][{"name": "calculator"}]', "[TOOL_CALLS]"),
        ('{"name": "calculator", "parameters": {"expression": "6*7"}}', "JSON with a name and arguments"),
        ("<tool_call>calculator\n<arg_key>a</arg_key>", "<tool_call>{JSON}"),
        ("<function=calculator><parameter=a>", "<function=NAME>"),
        ("<|channel|>commentary to=functions.calculator", "harmony's to=functions.NAME"),
        ('[calculator(expression="6*7")]', "[NAME(ARGUMENT=VALUE)]"),
        ("<｜tool▁calls▁begin｜>", "<|tool_call..."),
    ],
)
def test_calls_in_another_family_s_form_are_named(text: str, form: str) -> None:
    assert (find_call_form(text) or ("", ""))[0] == form
    told = explain(*[make_episode(text)] * 5, *[make_episode("It is 42.")] * 5)
    assert told is not None
    assert f"5 of 10 turns look like calls in the form {form}" in told
    assert "--chat_template, or --call_format" in told


def test_calls_that_cannot_be_read_are_told_of_with_the_first_reason() -> None:
    told = explain(*[make_episode("", "parse")] * 9)
    assert told is not None
    assert "not one of 9 calls could be read (the first: invalid JSON in the tool call)" in told


def test_a_model_that_calls_tools_is_left_in_peace() -> None:
    assert explain(*[make_episode("", "parse")] * 9, make_episode("", "ok")) is None
    assert find_call_form("The price in [brackets] is 3 < 4, {so} it goes.") is None


def test_an_evaluation_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    agentrl.evaluate("math-tools", tasks=8, out="a", rollout={"max_tokens": 1})
    assert "tools are offered, and none was called in 8 episodes" in (tmp_path / "a/events.jsonl").read_text()


def test_an_evaluation_of_an_environment_without_tools_does_not_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    agentrl.evaluate("game", tasks=8, out="a", rollout={"max_tokens": 1})
    assert not (tmp_path / "a/events.jsonl").exists()  # nothing was said
