"""Environments written wrongly: each mistake is one sentence that names the class, the value and the way out."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl import ContractError, Env, EnvSpec, InfraError, Reply, Step, ToolEnv, UserError, evaluate, tool, train
from agentrl.checks import check_env
from agentrl.cli import main
from agentrl.environments.gymnasium.to_gymnasium import as_gymnasium
from agentrl.errors import is_failure
from agentrl.evaluation.evaluate import list_tasks
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Observation, Stop, Trajectory


class Plain(Env):
    """One turn."""

    max_turns = 1

    async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        return "?", {}

    async def step(self, action: Reply) -> Step:
        return Step([], 1.0, True, False, {})


def counting(count: Any) -> type[Env]:
    """Make an environment whose ``count`` returns, or raises, what is given."""

    def method(self: Env, split: str) -> Any:
        if isinstance(count, Exception):
            raise count
        return count

    return type("Quiz", (Plain,), {"count": method})


class Unmade(Plain):
    def __init__(self) -> None:
        raise KeyError("rows")


COUNTS = [
    ("10", r"Quiz\.count\('\w+'\) returned '10'; it must return a whole number of tasks, or None"),
    (10.0, r"returned 10\.0; it must"),
    (-1, r"returned -1; it must"),
    (True, r"returned True; it must"),
    ([1], r"returned \[1\]; it must"),
    (KeyError("rows"), r"Quiz\.count\('\w+'\) raised KeyError: 'rows' \(test_env_misuse\.py, line \d+\)"),
]


@pytest.mark.parametrize(("count", "sentence"), COUNTS)
def test_a_count_that_is_no_number_of_tasks_is_a_sentence_wherever_it_is_asked(count: Any, sentence: str) -> None:
    env = counting(count)
    with pytest.raises(ContractError, match=sentence):
        list_tasks(EnvSpec(env), 4)
    with pytest.raises(ContractError, match=sentence):
        check_env(env)
    bridge = as_gymnasium(env)
    with pytest.raises(ContractError, match=sentence):
        bridge.reset()
    bridge.close()


def test_a_count_that_is_no_number_ends_training_and_evaluation_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"Quiz\.count\('train'\) returned '10'"):
        train(counting("10"), run={"dir": str(tmp_path / "run")})
    with pytest.raises(ContractError, match=r"Quiz\.count\('test'\) returned '10'"):
        evaluate(counting("10"), out=tmp_path / "eval")


def test_a_count_may_be_a_number_of_any_library() -> None:
    import numpy as np

    assert EnvSpec(counting(np.int64(7))).count("test") == 7
    assert EnvSpec(counting(None)).count("test") is None


def test_a_count_that_is_async_is_a_sentence() -> None:
    async def count(self: Env, split: str) -> int:
        return 3

    with pytest.raises(ContractError, match=r"Later\.count\('test'\) must be a plain `def`"):
        EnvSpec(type("Later", (Plain,), {"count": count})).count("test")


def test_a_split_without_tasks_is_told() -> None:
    with pytest.raises(UserError, match=r"count\('train'\) is 0: there is no task to play"):
        check_env(counting(0))
    bridge = as_gymnasium(counting(0))
    with pytest.raises(UserError, match="split 'train' of env 'Quiz' has no tasks"):
        bridge.reset()
    bridge.close()


def test_a_constructor_that_raises_is_a_sentence_in_every_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "from agentrl import Env\n\nclass E(Env):\n    def __init__(self):\n        open('nowhere/rows.csv')\n"
    Path("unmade_city.py").write_text(text)
    for words in (["train", "--env"], ["eval", "--env"], ["check", "env"], ["play", "--env"]):
        assert main([*words, "unmade_city.py:E"]) == 2
        said = capsys.readouterr().err
        assert "E.__init__ raised FileNotFoundError: " in said
        assert "(unmade_city.py, line 5)" in said
        assert "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("class E(\n", r"cannot import 'written_{n}': SyntaxError: .* \(written_{n}\.py, line 1\)"),
        ("E = missing\n", r"cannot import 'written_{n}': NameError: .* \(written_{n}\.py, line 1\)"),
        ("import sys\nsys.exit(3)\n", r"cannot import 'written_{n}': SystemExit: 3 \(written_{n}\.py, line 2\)"),
    ],
)
def test_a_file_that_cannot_be_imported_is_a_sentence(
    text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    number = len(text)
    Path(f"written_{number}.py").write_text(text)
    with pytest.raises(UserError, match=sentence.format(n=number)):
        EnvSpec(f"written_{number}.py:E")


def attributed(**attributes: Any) -> type[Env]:
    return type("Odd", (Plain,), attributes)


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"max_turns": "8"}, r"Odd\.max_turns is '8'; it is a whole number of turns, 1 or more"),
        ({"max_turns": 0}, r"Odd\.max_turns is 0; "),
        ({"reward_weights": ["a"]}, r"Odd\.reward_weights is \['a'\]; it is a dict of a finite number"),
        ({"reward_weights": {"reward": "much"}}, r"Odd\.reward_weights is \{'reward': 'much'\}"),
        ({"reward_weights": {"reward": float("nan")}}, r"Odd\.reward_weights is \{'reward': nan\}"),
        ({"best_reward": "high"}, r"Odd\.best_reward is 'high'; it is a finite number"),
        ({"metrics": {"steps": "many"}}, r"Odd\.metrics is \{'steps': 'many'\}; it is a dict of a finite number"),
        ({"metrics": 3}, r"Odd\.metrics is 3; "),
        ({"extras": [1]}, r"Odd\.extras is \[1\]; it is a dict by names"),
    ],
)
async def test_an_odd_attribute_of_an_environment_is_a_sentence(attributes: dict[str, Any], sentence: str) -> None:
    rollout = Rollout(EnvSpec(attributed(**attributes)), ScriptedEngine(["yes"]), ByteRenderer())
    with pytest.raises(ContractError, match=sentence):
        await rollout.group(3, 2)


@pytest.mark.parametrize("tools", ["calculator", 3, {"calculator"}])
def test_tools_that_are_no_list_are_a_sentence(tools: Any) -> None:
    env = type("Odd", (ToolEnv,), {"tools": tools})
    with pytest.raises(ContractError, match=r"Odd\.tools is .*; write a list, such as tools = \["):
        EnvSpec(env).tool_list()


async def plain_coroutine(cls: Any, **settings: Any) -> int:
    return 3


@asynccontextmanager
async def raising(cls: Any, **settings: Any) -> AsyncIterator[None]:
    raise FileNotFoundError("no rows.csv")
    yield


@asynccontextmanager
async def dead(cls: Any, **settings: Any) -> AsyncIterator[None]:
    raise InfraError("database", "the database at 10.0.0.1 does not answer")
    yield


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (plain_coroutine, r"Odd\.open_shared must be an async context manager: write @asynccontextmanager"),
        (raising, r"Odd\.open_shared raised FileNotFoundError: no rows\.csv \(test_env_misuse\.py, line \d+\)"),
        (dead, "the database at 10.0.0.1 does not answer"),
    ],
)
async def test_a_shared_part_that_cannot_be_opened_is_a_sentence(method: Any, sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        async with EnvSpec(attributed(open_shared=classmethod(method))).open():
            pass


def failing(method: str, error: BaseException, base: type[Env] = Plain) -> type[Env]:
    async def fail(self: Env, *_: Any, **__: Any) -> None:
        raise error

    return type("Failing", (base,), {method: fail})


ENDS = [GeneratorExit(), SystemExit(3), BaseExceptionGroup("both", [SystemExit(1), KeyError("x")])]


@pytest.mark.parametrize("method", ["reset", "step", "score", "close"])
@pytest.mark.parametrize("error", ENDS, ids=lambda e: type(e).__name__)
async def test_an_environment_that_ends_in_any_way_is_a_fault_that_is_counted(
    method: str, error: BaseException
) -> None:
    rollout = Rollout(EnvSpec(failing(method, error)), ScriptedEngine(["yes"]), ByteRenderer())
    group = await rollout.group(3, 2)
    assert [(t.fault.kind, t.stop) for t in group if t.fault] == [(f"env_{method}", Stop.FAULT)] * 2
    assert all(type(error).__name__ in t.fault.message for t in group if t.fault)


async def test_an_environment_whose_close_cancels_itself_is_a_fault_that_is_counted() -> None:
    rollout = Rollout(EnvSpec(failing("close", asyncio.CancelledError())), ScriptedEngine(["yes"]), ByteRenderer())
    assert [t.fault.kind for t in await rollout.group(3, 2) if t.fault] == ["env_close"] * 2


@pytest.mark.parametrize("error", [*ENDS, asyncio.CancelledError()], ids=lambda e: type(e).__name__)
async def test_a_comparison_of_a_group_that_ends_in_any_way_is_its_members_fault(error: BaseException) -> None:
    env = failing("score_group", error, type("Compared", (Plain,), {"scores_groups": True}))
    group = await Rollout(EnvSpec(env), ScriptedEngine(["yes"]), ByteRenderer()).group(3, 2)
    assert [t.fault.kind for t in group if t.fault] == ["env_score"] * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BaseExceptionGroup("", [KeyboardInterrupt()])])
def test_ctrl_c_is_no_failure_of_an_environment(error: BaseException) -> None:
    assert not is_failure(error)


@pytest.mark.parametrize("calls", [1, 2])
async def test_a_tool_that_calls_exit_is_a_fault_and_the_run_goes_on(calls: int) -> None:
    @tool
    def leave() -> str:
        """Leave."""
        sys.exit(2)

    class Leaving(ToolEnv):
        tools = (leave,)

        async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
            return "?", {}

        async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
            return {"fine": 1.0}

    engine = ScriptedEngine(["".join([call("leave")] * calls)])
    group = await Rollout(EnvSpec(Leaving), engine, ByteRenderer()).group(3, 2)
    assert [t.fault.kind for t in group if t.fault] == ["tool_error"] * 2
    assert all("it raised SystemExit(2)" in t.fault.message for t in group if t.fault)


def test_a_reward_that_raises_everywhere_is_one_line_that_names_the_line(tmp_path: Path) -> None:
    env = failing("score", KeyError("rows"))
    with pytest.raises(
        UserError, match=r"could be scored\. The first fault .* raised KeyError: 'rows' \(\w+\.py, line"
    ) as e:
        train(env, steps=1, eval={"final_tasks": 2}, rollout={"max_tokens": 2}, run={"dir": str(tmp_path / "run")})
    assert "\n" not in str(e.value)
