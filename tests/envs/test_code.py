"""code: an oracle gets all, doing nothing gets nothing, and the tests cannot be seen."""

from __future__ import annotations

import ast
from collections import Counter
from typing import Any

import anyio
import pytest
from agentrl_envs import code_tasks

from agentrl import EnvSpec, UserError
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call


def fenced(source: str) -> str:
    return f"```python\n{source}```"


async def rewards(spec: EnvSpec, script: Any, tasks: range = range(12), split: str = "train") -> list[Any]:
    async with spec.open():
        rollout = Rollout(spec, ScriptedEngine(script), ByteRenderer(), split=split)
        groups = [await rollout.group(task, 2) for task in tasks]
        assert all(t.fault is None for g in groups for t in g), [t.fault for g in groups for t in g if t.fault]
        return [t.rewards for g in groups for t in g]


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_oracle_gets_its_maximum(split: Any) -> None:
    def script(session: str, turn: int) -> str:
        task = code_tasks.draw(int(session.split("-")[0]), split=split)
        if turn == 0:
            return call("python", code=f"{task.solution}\nprint({task.function}({task.tests[0][0][0]!r}))")
        return f"It works. {fenced(task.solution)}"

    assert anyio.run(rewards, EnvSpec("code"), script, range(12), split) == [{"correct": 1.0, "passed": 1.0}] * 24


@pytest.mark.parametrize(
    "answer", ["", "I cannot.", fenced("def f(x): return None\n"), fenced("import os; os._exit(0)\n"), fenced("x = (")]
)
def test_who_does_nothing_gets_nothing(answer: str) -> None:
    found = anyio.run(rewards, EnvSpec("code", tool=False), [answer], range(6))
    assert found == [{"correct": 0.0, "passed": 0.0}] * 12


@pytest.mark.slow
def test_a_constant_is_not_paid() -> None:
    for value in ("0", "None", "[]", "True", "''", "x"):

        def script(session: str, turn: int, value: str = value) -> str:
            task = code_tasks.draw(int(session.split("-")[0]), split="train")
            return fenced(f"def {task.function}(x): return {value}\n")

        found = anyio.run(rewards, EnvSpec("code", tool=False), script, range(40))
        assert sum(r["correct"] for r in found) / len(found) <= 0.05, value


@pytest.mark.parametrize("split", ["train", "test"])
def test_no_constant_passes_the_hidden_tests_of_any_task(split: Any) -> None:
    families: Counter[str] = Counter()
    for seed in range(800):
        task = code_tasks.draw(seed, split=split)
        families[task.family] += 1
        results = [result for _, result in task.tests]
        assert len(results) == code_tasks.HIDDEN
        for constant in results:
            assert sum(r == constant for r in results) <= code_tasks.ALIKE, task
        assert code_tasks.draw(seed, split=split) == task
    assert len(families) >= 8


def test_balanced_tasks_have_deep_brackets_and_both_answers() -> None:
    tasks = [t for t in (code_tasks.draw(seed, split="train") for seed in range(400)) if t.family == "balanced"]
    assert {len({r for _, r in task.tests}) for task in tasks} == {2}
    depths = {max((text[: i + 1].count("(") - text[: i + 1].count(")") for i in range(len(text))), default=0)
              for task in tasks for (text,), _ in task.tests}  # fmt: skip
    assert max(depths) >= 5


def test_tasks_are_real_and_the_splits_apart() -> None:
    train = {code_tasks.draw(k, split="train").solution.split("\n", 1)[1] for k in range(300)}
    test = {code_tasks.draw(k, split="test").solution.split("\n", 1)[1] for k in range(300)}
    assert not train & test
    assert {code_tasks.draw(k, split="train").family for k in range(300)} == set(code_tasks.FAMILIES)
    task = code_tasks.draw(5, split="train")
    assert task == code_tasks.draw(5, split="train")
    ast.parse(task.solution)
    assert len(task.tests) == 10


def test_rows_of_ones_own() -> None:
    rows = [
        {"prompt": "square", "tests": "assert f(3) == 9"},
        {"prompt": "twice", "tests": "[[[2], 4]]", "function": "f"},
    ]
    spec = EnvSpec("code", data=rows * 10, tool=False)
    right = anyio.run(rewards, spec, [fenced("def f(n): return n * n\n")], range(4))
    assert [r["correct"] for r in right] == [1.0] * 8
    with pytest.raises(UserError, match=r"env.data of env 'code' has rows with prompt and tests"):
        anyio.run(rewards, EnvSpec("code", data=[{"prompt": "a"}]), [""])


def test_math_tools_with_python() -> None:
    def script(session: str, turn: int) -> str:
        from agentrl_envs import math_tasks

        task = math_tasks.draw(int(session.split("-")[0]), split="train")
        return call("python", code=task.expression) if turn == 0 else rf"\boxed{{{task.answer}}}"

    found = anyio.run(rewards, EnvSpec("math-tools", tool="python"), script, range(4))
    assert found == [{"correct": 1.0}] * 8
