"""BFCL's multi-turn tasks, the real APIs and the real answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from agentrl_envs import bfcl_world
from agentrl_envs.bfcl import BFCL, CATEGORIES, STEPS, find_data_folder

from agentrl import ContractError, EnvSpec, Reply, Trajectory
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Stop, ToolCall

pytest.importorskip("bfcl_eval")

NOTHING = Trajectory(task=0, segments=(), messages=(), stop=Stop.TERMINATED)


@pytest.fixture
async def spec() -> AsyncIterator[EnvSpec]:
    async with EnvSpec(BFCL).open() as opened:
        yield opened


def true_calls(env: BFCL) -> list[tuple[str, dict[str, Any]]]:
    """The ground truth of the user's present turn, its arguments by name."""
    found = []
    for text in env.row["ground_truth"][env.user_turn]:
        name, positional, named = bfcl_world.parse_call(text)
        document = bfcl_world.load_documents(find_data_folder(), env.row["involved_classes"])[name]
        found.append((name, dict(zip(document["parameters"]["properties"], positional, strict=False)) | named))
    return found


async def begun(spec: EnvSpec, task: int, split: str = "all") -> BFCL:
    env = spec.make()
    assert isinstance(env, BFCL)
    await env.reset(seed=task, options={"split": split})
    return env


async def finished(env: BFCL, *, idle: bool = False) -> float:
    """Play the ground truth to the end, or say nothing but words."""
    over = False
    while not over:
        if calls := [] if idle else true_calls(env):
            await env.step(Reply("", tuple(ToolCall(f"{i}", *c) for i, c in enumerate(calls))))
        over = (await env.step(Reply("That is done."))).terminated
    return (await env.score(NOTHING))["correct"]


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])
async def test_the_ground_truth_is_right_in_all_800_tasks_and_nothing_in_none(spec: EnvSpec, every: int) -> None:
    tasks = range(spec.make().count("all") or 0)[::every]
    assert len(tasks) * every == 800
    assert [task for task in tasks if await finished(await begun(spec, task)) != 1.0] == []
    assert [task for task in tasks if await finished(await begun(spec, task), idle=True) != 0.0] == []


async def test_an_episode_from_end_to_end(spec: EnvSpec) -> None:
    env = await begun(spec, 0)
    script: list[str] = []
    for turn in range(len(env.row["question"])):
        env.user_turn = turn
        script += ["".join(call(name, **arguments) for name, arguments in true_calls(env)), "Done."]
    t = await Rollout(spec, ScriptedEngine(script), ByteRenderer(), split="all").episode(0)
    assert (t.fault, t.reward, t.stop, t.info["id"]) == (None, 1.0, "terminated", "multi_turn_base_0")
    assert [c.status for c in t.calls] == ["ok"] * sum(map(len, env.row["ground_truth"]))
    users = [m["content"] for m in t.messages if m["role"] == "user"]
    assert users == [m["content"] for turn in env.row["question"] for m in turn]


async def test_a_wrong_state_or_a_missing_answer_is_wrong(spec: EnvSpec) -> None:
    env = await begun(spec, 0)
    await env.step(Reply("", (ToolCall("1", "mkdir", {"dir_name": "elsewhere"}),)))
    assert await finished(env) == 0.0
    env = await begun(spec, 0)  # the state is right after looking only, the answers are not there
    await env.step(Reply("", (ToolCall("1", "pwd", {}),)))
    await env.step(Reply("done"))
    assert not env.valid


async def test_functions_that_come_later(spec: EnvSpec) -> None:
    task = next(k for k, row in enumerate(spec.shared["all"]) if row["id"] == "multi_turn_miss_func_0")
    env = await begun(spec, task)
    while env.user_turn < 3:
        assert "sort" not in {t.name for t in env.tool_list}
        step = await env.step(Reply("I cannot."))
    assert "sort" in {t.name for t in env.tool_list}
    (told,) = (m for m in step.observation if isinstance(m, dict))
    assert '"name": "sort"' in told["content"]  # the prompt is not told again, so the functions are in the message
    assert told["content"].endswith("What about now?")


async def test_what_functions_say_no_to_and_what_they_raise_is_text_for_the_model(spec: EnvSpec) -> None:
    env = await begun(spec, 0)
    calls = (ToolCall("1", "cd", {"folder": "nowhere"}), ToolCall("2", "cd", {"wrong": 1}), ToolCall("3", "exec", {}))
    step = await env.step(Reply("", calls))
    said = [m["content"] for m in step.observation if isinstance(m, dict)]
    assert "No such file" in said[0]
    assert said[1].startswith("Error during execution: ")
    assert said[2].startswith("error: unknown tool 'exec'")


async def test_too_many_calls_for_one_request_end_the_episode(spec: EnvSpec) -> None:
    env = await begun(spec, 0)
    steps = [await env.step(Reply("", (ToolCall("1", "pwd", {}),))) for _ in range(STEPS)]
    assert [s.truncated for s in steps] == [False] * (STEPS - 1) + [True]
    assert (await env.score(NOTHING))["correct"] == 0.0


async def test_no_task_nor_variant_of_it_is_in_both_splits(spec: EnvSpec) -> None:
    numbers = {s: {row["id"].rpartition("_")[2] for row in spec.shared[s]} for s in ("train", "test")}
    assert not numbers["train"] & numbers["test"]
    assert len(numbers["train"]) + len(numbers["test"]) == 200
    async with EnvSpec(BFCL, name=CATEGORIES[2]).open() as one:
        assert {row["id"][:21] for row in one.shared["all"]} == {"multi_turn_miss_param"}
        assert one.make().count("all") == 200


async def test_what_is_not_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ContractError, match=r"bfcl has no category 'multi_turn_bas'; did you mean 'multi_turn_base'\?"):
        async with EnvSpec(BFCL, name="multi_turn_bas").open():
            pass
    monkeypatch.setattr("agentrl_envs.bfcl.find_spec", lambda _: None)
    with pytest.raises(Exception, match="pip install --no-deps bfcl-eval, then pip install 'agentrl-gym"):
        find_data_folder()
