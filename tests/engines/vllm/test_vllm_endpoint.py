"""Measuring a model behind a real OpenAI-compatible server, vLLM's: tools by the API's own calls. `make vllm`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from agentrl.cli import main
from agentrl.engines.vllm.server_process import ServerSettings, VLLMServer
from agentrl.engines.vllm.tool_parsers import find_tool_parser
from agentrl.evaluation.evaluate import evaluate
from agentrl.models import policy
from agentrl.models.source import locate_model

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """As `agentrl serve` starts it."""
    parser = find_tool_parser(policy.load_tokenizer("nano"))
    with VLLMServer(ServerSettings(locate_model("nano"), tool_parser=parser)).wait() as server:
        yield f"{server.url}/v1"


def test_greedily_a_model_does_the_same_as_when_it_is_ours(url: str) -> None:
    """Calls that cannot be read too: the model is told what is wrong with them, and goes on."""
    same: Any = {"tasks": 100, "greedy": True, "rollout": {"max_tokens": 64}}
    there, ours = evaluate("math-tools", endpoint=url, out="there", **same), evaluate("math-tools", out="ours", **same)
    assert there.faults == 0
    assert (there.reward, there.calls, there.turns) == pytest.approx((ours.reward, ours.calls, ours.turns), abs=0.03)
    assert there.failed_calls == pytest.approx(ours.failed_calls, abs=0.03)


def test_a_model_is_worth_the_same_as_when_it_is_ours(url: str) -> None:
    limits = {"max_tokens": 64}
    there = evaluate("math-tools", endpoint=url, tasks=200, rollout=limits)
    ours = evaluate("math-tools", "nano", tasks=200, rollout=limits)
    assert there.faults == 0
    assert there.reward == pytest.approx(ours.reward, abs=4 * max(ours.stderr, there.stderr))
    assert 0.4 < there.calls < 1.3
    assert there.failed_calls is not None
    assert there.failed_calls < 0.4


def test_by_the_command_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rollout.max_tokens", "64", "--tasks", "4"]
    assert main(["eval", "--env", "math-tools", "--endpoint", url, *words]) == 0
    told = capsys.readouterr().out
    assert "sampled" in told
    assert url in told


def test_one_without_a_parser_of_calls_gets_tools_in_text(tmp_path: Path) -> None:
    with VLLMServer(ServerSettings(locate_model("nano"))).wait() as server:
        found = evaluate("math-tools", endpoint=server.url, tasks=8, out="a", rollout={"max_tokens": 64})
    assert (found.faults, found.episodes) == (0, 8)
    assert "takes no tools" in (tmp_path / "a" / "events.jsonl").read_text()
