"""math-tools as it is played: a calculator, and the answer in a box."""

from __future__ import annotations

from typing import Any

import pytest
from agentrl_envs import math_tasks

from agentrl import ContractError, EnvSpec, Trajectory
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call


async def play(*said: str, task: int = 7, split: str = "train", **settings: Any) -> Trajectory:
    spec = EnvSpec("math-tools", **settings)
    return await Rollout(spec, ScriptedEngine(said), ByteRenderer(), split=split).episode(task)


async def test_calculate_and_answer() -> None:
    task = math_tasks.draw(7, split="train", level=3)
    t = await play(call("calculator", expression=task.expression), f"It is \\boxed{{{task.answer}}}.")
    assert [m["role"] for m in t.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert (t.messages[1]["content"], t.messages[3]["content"]) == (task.question, str(task.answer))
    assert (t.rewards, t.reward, t.info) == (
        {"correct": 1.0},
        1.0,
        {"family": task.family, "expected": str(task.answer)},
    )


@pytest.mark.parametrize("said", ["74490", "\\boxed{74491}", "\\boxed{74490} no, \\boxed{1}", "<think>\\boxed{74490}"])
async def test_only_the_right_number_in_the_last_box_counts(said: str) -> None:
    assert math_tasks.draw(7, split="train", level=3).answer == 74490
    assert (await play(said)).reward == 0.0
    assert (await play("\\boxed{74,490}")).reward == 1.0


async def test_the_boxed_answer_must_be_in_the_last_turn() -> None:
    assert (await play("\\boxed{74490} " + call("calculator", expression="1"), "so it is")).reward == 0.0


async def test_a_no_of_the_calculator_can_be_read() -> None:
    t = await play(call("calculator", expression="1/0"), call("calculator"), "\\boxed{1}")
    told = [m["content"] for m in t.messages if m["role"] == "tool"]
    assert told[0] == "error: division by zero"
    assert told[1].startswith("error: bad arguments for calculator: expression: ")


async def test_the_same_seed_is_the_same_question_and_splits_differ() -> None:
    questions = [(await play("x", split=split)).messages[1]["content"] for split in ("train", "train", "test")]
    assert questions[0] == questions[1] != questions[2]


async def test_settings_choose_the_tasks() -> None:
    for task in range(5):
        t = await play("x", task=task, level="1", families="word,steps")
        assert t.info["family"] in ("word", "steps")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"level": 9}, "env 'math-tools': level is 1 to 4, not 9"),
        ({"families": "algebra"}, "env 'math-tools': families are some of"),
        ({"level": "hard"}, "env.level of env 'math-tools': input should be a valid integer"),
        ({"leve": 1}, r"env 'math-tools' has no setting 'env.leve'; did you mean 'level'\?"),
    ],
)
async def test_wrong_settings_are_sentences(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        await play("x", **settings)
