"""The last lines of a run on the terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.output import Console
from agentrl.cli.summary import _conversation, _read_raw_calls
from agentrl.credit import record_held_out
from agentrl.types import CallRecord, Group
from tests.helpers import runs

RAW = '<tool_call>{"name": "price", "arguments": {"item": \x1bhat}}</tool_call>'


def test_a_call_that_could_not_be_read_is_shown_as_it_was_written(tmp_path: Path) -> None:
    said: Any = [
        {"role": "user", "content": "What do hats cost?"},
        {"role": "assistant", "content": "", "tool_calls": [runs.call("")]},
        {"role": "tool", "content": "error: invalid JSON in the tool call", "tool_call_id": "c0"},
    ]
    made = runs.played(7, said, 0.0, calls=[CallRecord(0, "", "parse", 0.0)])
    made = replace(made, segments=(made.segments[0], runs.segment("model", RAW), made.segments[2]))
    run = runs.start(tmp_path / "run")
    run.write_trajectories(0, record_held_out([Group(7, (made, runs.wrong(7)))]), "test")
    out = io.StringIO()
    raw = _read_raw_calls(str(tmp_path / "run"), "test-0:0")
    _conversation(Console(file=out, width=400), "before", json.loads(json.dumps(said)), raw)
    assert RAW.replace("\x1b", "[ESC]") in out.getvalue().replace("\u241b", "[ESC]")
    assert "\x1b" not in out.getvalue()
    assert "(a call that could not be read)" in out.getvalue()


@pytest.mark.parametrize("name", ["test-0:9", "test-5:0"])
def test_an_episode_that_is_not_there_costs_the_text_of_its_calls_alone(name: str, tmp_path: Path) -> None:
    assert _read_raw_calls(str(runs.broken(tmp_path / "run", steps=1)), name) == []
