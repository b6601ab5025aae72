"""TRL's tests of GRPOTrainer's tools and environments; what the model says is written down, as TRL patches it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl import Step, ToolEnv, tool, train
from agentrl.types import Trajectory
from tests.trl.trainer import CHATS, random_numbers, say, tiny, tokenizer, train_trl

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
SMALL: dict[str, Any] = {
    "learning_rate": 0.1,
    "num_generations": 3,
    "per_device_train_batch_size": 3,
    "max_completion_length": 100,
    "max_steps": 1,
    "eval": {"every": 0, "final_tasks": 1},
}


def call(name: str, **arguments: object) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def multiply_tool(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a * b


async def async_multiply_tool(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a * b


@pytest.mark.parametrize("function", [multiply_tool, async_multiply_tool])
def test_train_with_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    name = function.__name__
    say(monkeypatch, [call(name, a=3, b=4), "Done!"], [call(name, a=3, c=4), "Done!"], ["I know no tool"])
    more = {"train_dataset": CHATS, "max_completion_length": 100, "reward_funcs": random_numbers}
    run = train_trl(tmp_path, tools=[function], **more)
    assert run.metric("tools/call_frequency") == pytest.approx(2 / 3)
    assert run.metric("tools/failure_frequency") == pytest.approx(1 / 2)
    assert sum(run.changed().values()) > 0.9 * len(run.changed())


def test_train_with_malformed_tool_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(
        monkeypatch,
        ['<tool_call>{"arguments": {"a": 3, "b": 4}}</tool_call>', "Done!"],
        ['<toolcall>{"arguments": {"a": 3}}</toolcall>'],
        ['<tool_call>{"arguments": {a: 3, b: 4}}</tool_call>', "Done!"],
    )
    more = {"train_dataset": CHATS, "max_completion_length": 100, "reward_funcs": random_numbers}
    run = train_trl(tmp_path, tools=[multiply_tool], **more)
    assert run.metric("loss") is not None
    assert sum(run.changed().values()) > 0.9 * len(run.changed())


class Counter(ToolEnv):
    """TRL's environment_factory with a class: a counter of the episode's own."""

    ended: list[int] = []

    async def reset(self, *, seed: int, options: Any = None) -> Any:
        self.counter = 0
        return [{"role": "user", "content": "Count."}], {}

    @tool
    async def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: what is added.
        """
        self.counter += step
        return self.counter

    async def score(self, trajectory: Trajectory) -> Mapping[str, float | None]:
        self.ended.append(self.counter)
        return {"Counter": float(self.counter)}


def train_env(folder: Path, env: type[ToolEnv], **given: Any) -> list[dict[str, float]]:
    train(env, tiny(), tokenizer=tokenizer(), output_dir=str(folder / "run"), **{**SMALL, **given})
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def test_train_with_environment_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, [call("increment", step=1), "Done!"], [call("decrement", step=2), "Done!"], ["I will not"])
    Counter.ended.clear()
    rows = train_env(tmp_path, Counter)
    step = next(row for row in rows if "reward" in row)
    assert step["tools/call_frequency"] == pytest.approx(2 / 3)
    assert step["tools/failure_frequency"] == pytest.approx(1 / 2)
    assert set(Counter.ended) == {0, 1}


def test_train_with_environment_owned_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, [call("increment", step=1), "Done!"], [call("increment", step=1), "Done!"], ["I will not"])
    rows = train_env(tmp_path, Counter)
    step = next(row for row in rows if "rewards/Counter/mean" in row)
    assert step["rewards/Counter/mean"] in [pytest.approx(share / 3) for share in (1, 2)]


def test_environment_owned_reward_coexists_with_reward_funcs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment names its rewards; several of them have weights of its own."""

    class Both(Counter):
        reward_weights = {"Counter": 1.0, "format": 0.5}

        async def score(self, trajectory: Trajectory) -> Mapping[str, float | None]:
            return {**await super().score(trajectory), "format": 1.0}

    say(monkeypatch, [call("increment", step=1), "Done!"], ["I will not"])
    step = next(row for row in train_env(tmp_path, Both) if "reward" in row)
    assert step["reward"] == pytest.approx(step["rewards/Counter/mean"] + 0.5, abs=1e-5)


def test_environment_owned_reward_mixed_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that does not apply to a task is None, and is in no mean."""

    class Mixed(Counter):
        async def reset(self, *, seed: int, options: Any = None) -> Any:
            self.scored = seed % 2 == 0
            return await super().reset(seed=seed)

        async def score(self, trajectory: Trajectory) -> Mapping[str, float | None]:
            return {"scored": 1.0 if self.scored else None, "format": 0.0}

    say(monkeypatch, ["Done!"])
    rows = train_env(tmp_path, Mixed, per_device_train_batch_size=6)
    step = next(row for row in rows if "rewards/scored/mean" in row)
    assert (step["rewards/scored/mean"], step["rewards/format/mean"]) == (1.0, 0.0)


def test_train_with_multiple_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's dict of environments is one class here, which has other tools for other tasks."""
    made: dict[str, list[Any]] = {"increment": [], "shout": []}

    @tool
    async def increment(step: int) -> int:
        """Add one.

        Args:
            step: what is added.
        """
        made["increment"].append(step)
        return step

    @tool
    async def shout(text: str) -> str:
        """Shout a text.

        Args:
            text: the text.
        """
        made["shout"].append(text)
        return text.upper()

    class Either(ToolEnv):
        tools = [increment, shout]

        async def reset(self, *, seed: int, options: Any = None) -> Any:
            self.tools = [increment] if seed % 2 else [shout]
            return [{"role": "user", "content": "Go."}], {}

        async def score(self, trajectory: Trajectory) -> Mapping[str, float | None]:
            return {"called": float(sum(m["role"] == "tool" for m in trajectory.messages))}

    both = [call("increment", step=1), call("shout", text="hi"), "Done!"]
    say(monkeypatch, both, both, ["I will not"])
    train_env(tmp_path, Either, per_device_train_batch_size=6)
    assert set(made["increment"]) == {1}
    assert set(made["shout"]) == {"hi"}


def test_train_with_environment_owned_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment brings its tasks; there is no dataset, and the steps say how long."""

    class Guess(ToolEnv):
        async def reset(self, *, seed: int, options: Any = None) -> Any:
            return [{"role": "user", "content": "Guess the word of five letters."}], {}

        async def step(self, action: Any) -> Step:
            return Step([], 0.0, True, False, {})

        async def score(self, trajectory: Trajectory) -> Mapping[str, float | None]:
            return {"length": float(len(trajectory.messages[-1]["content"]))}

    say(monkeypatch, ["Done!"], ["Done Done!"], ["Done Done Done!"])
    assert any("rewards/length/mean" in row for row in train_env(tmp_path, Guess))
