"""Where every episode earns the same, the run says why and names the ways out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.health.monitor import STEPS, HealthMonitor
from agentrl.types import CallRecord, Group, Stop, Trajectory


def episode(*calls: tuple[str, str], stop: Stop = Stop.TERMINATED, reward: float = 0.0) -> Trajectory:
    """Calls are names and statuses."""
    records = tuple(CallRecord(0, name, status, 0.0) for name, status in calls)
    return Trajectory(0, (), ({"role": "assistant", "content": ""},), stop, {"r": reward}, calls=records)


def told(members: Sequence[Trajectory], *, tools: bool = True, env: str = "search-qa", model: str = "nano") -> str:
    """What is said after as many steps of the same episodes as it takes."""
    monitor = HealthMonitor(tools=tools, env=env, model=model, run="runs/x")
    steps = [monitor.check_episodes([Group(0, tuple(members))]) for _ in range(STEPS + 1)]
    assert steps[-1] == []
    return " ".join(text for step in steps for text in step if text.startswith("every episode"))


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([episode()] * 4, "Not one of 12 episodes made a call, though tools are offered"),
        (
            [episode(("", "parse"), ("seek", "unknown_tool"))] * 4,
            "Not one of 24 calls succeeded: 12 could not be parsed, 12 failed",
        ),
        (
            [episode(("search", "ok"), ("", "parse"))] * 4,
            "12 of 12 episodes made a call that succeeded, and none earned",
        ),
        ([episode(stop=Stop.MAX_TOKENS)] * 4, "12 of 12 episodes ran out of tokens before they ended"),
    ],
)
def test_what_the_episodes_have_in_common_is_the_reason(members: list[Trajectory], why: str) -> None:
    text = told(members)
    assert text.startswith(f"every episode of {STEPS} steps was worth 0: nothing is learned. {why}")
    assert "agentrl view runs/x" in text
    assert "agentrl play --env search-qa --save" in text


def test_each_reason_has_its_own_way_out() -> None:
    assert "--rollout.max_tokens" in told([episode(stop=Stop.MAX_TOKENS)])
    assert "agentrl check model nano" in told([episode(("", "parse"))])
    assert "agentrl check model" not in told([episode(("search", "ok"))])
    assert "your own right answer earns nothing either" in told([episode(("search", "ok"))])
    assert "No answer earned anything" in told([episode()], tools=False)


def test_a_model_made_for_some_environments_is_named_elsewhere() -> None:
    assert "another --model: nano knows math-tools and shop only" in told([episode()])
    assert "another --model" not in told([episode()], env="shop")
    assert "another --model" not in told([episode()], model="Qwen/Qwen3-0.6B")


def test_where_every_episode_earns_the_most_harder_tasks_are_the_way() -> None:
    text = told([episode(("search", "ok"), reward=1.0)])
    assert text.endswith("Try harder tasks, or a reward that tells good answers from better ones")


def test_rewards_that_vary_begin_the_count_anew() -> None:
    monitor = HealthMonitor(tools=False)
    for _ in range(3):
        assert monitor.check_episodes([Group(0, (episode(), episode()))]) == []
        assert monitor.check_episodes([Group(0, (episode(), episode(reward=1.0)))]) == []


@pytest.mark.slow
def test_nano_on_an_environment_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--rollout.tasks_per_step", "2", "--rollout.group_size", "2", "--eval.final_tasks", "2", "--eval.every", "0"]
    assert main(["train", "--env", "search-qa", "--steps", "3", "--run.dir", str(tmp_path / "run"), *few]) == 0
    assert "nano knows math-tools and shop only" in " ".join(capsys.readouterr().out.split())
    lines = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert any(
        "nothing is learned" in line["text"] and f"agentrl view {tmp_path / 'run'}" in line["text"] for line in lines
    )
