"""Our environments as Gymnasium's: its own checker, without a warning (they are errors here)."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import gymnasium
import pytest
from agentrl_envs import math_tasks, shop_tasks
from agentrl_envs.shop import Shop
from gymnasium.utils.env_checker import check_env

import agentrl
from agentrl import ContractError, Env, EnvSpec, InfraError, Reply, Step, ToolEnv, Trajectory, UserError, tool
from agentrl.environments.gymnasium.spaces import MessageSpace, TextSpace
from agentrl.testing import call
from agentrl.types import Observation

events: list[str] = []


class Walk(Env):
    """Three steps, each worth one; the score is their sum."""

    max_turns = 5

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self.at, self.split = seed, (options or {})["split"]
        return f"{self.split} {seed}", {"seen": [1]}

    async def step(self, action: Reply) -> Step:
        if action.content == "fault":
            raise InfraError("ice_broke", "the ice broke")
        return Step(f"{action.content}?", 1.0, action.content == "stop", False, {})

    async def close(self) -> None:
        events.append("env closed")


class Judged(Walk):
    reward_weights = {"good": 2.0, "bad": -1.0, "seen": 0.0}

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[str]:
        events.append("opened")
        yield "shared"
        events.append("shut")

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        assert self.shared == "shared"
        said = [m["content"] for m in trajectory.messages if m["role"] == "assistant"]
        return {"good": 3.0, "bad": float(len(said)), "seen": float(trajectory.turns), "none": None}


@pytest.fixture(autouse=True)
def _silence() -> None:
    events.clear()


@pytest.mark.parametrize("env", ["math-tools", "shop", Shop, Walk, Judged])
def test_gymnasiums_own_checker_has_nothing_to_say(env: str | type[Env]) -> None:
    adapted = agentrl.as_gymnasium(env)
    check_env(adapted)
    adapted.close()


def test_an_oracle_and_one_who_does_nothing() -> None:
    env = agentrl.as_gymnasium("shop", latency_s=0.0)
    task = shop_tasks.draw(3, split="train")
    observation, info = env.reset(seed=3)
    assert observation[1]["content"] == task.question
    assert {t["function"]["name"] for t in info["tools"]} == {"price", "calculator"}
    observation, *_ = env.step("".join(call("price", item=item) for item in task.basket))
    assert [m["content"] for m in observation] == [str(task.prices[item]) for item in task.basket]
    *_, reward, terminated, truncated, info = env.step(f"\\boxed{{{task.answer}}}")
    assert (reward, terminated, truncated, info["rewards"]) == (1.0, True, False, {"correct": 1.0})
    env.reset(seed=3)
    assert env.step("")[1:4] == (0.0, True, False)
    env.close()


def test_step_rewards_are_not_paid_twice_and_weights_are_applied() -> None:
    env = agentrl.as_gymnasium(Walk)
    env.reset(seed=1)
    assert [env.step(said)[1:4] for said in ("go", "stop")] == [(1.0, False, False), (1.0, True, False)]
    env.close()
    env = agentrl.as_gymnasium(Judged)
    env.reset(seed=1)
    env.step("go")
    assert env.step("stop")[1] == 1.0 + 2.0 * 3.0 - 1.0 * 2.0
    env.close()


def test_too_many_turns_truncate() -> None:
    env = agentrl.as_gymnasium(Walk, max_turns=2)
    env.reset(seed=1)
    assert [env.step("go")[2:4] for _ in range(2)] == [(False, False), (False, True)]
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        env.step("go")
    env.close()


def test_tasks_and_splits() -> None:
    env = agentrl.as_gymnasium(Walk, split="test")
    assert env.reset(seed=7)[0] == [{"role": "user", "content": "test 7"}]
    drawn = [env.reset()[1]["task"] for _ in range(3)]
    env.reset(seed=7)
    assert [env.reset()[1]["task"] for _ in range(3)] == drawn
    assert len(set(drawn)) == 3
    assert env.reset(seed=7, options={"split": "train"})[0][0]["content"] == "train 7"
    env.close()


def test_everything_is_closed_once() -> None:
    before = threading.active_count()
    env = agentrl.as_gymnasium(Judged)
    env.reset(seed=1)
    env.reset(seed=2)
    assert events == ["opened", "env closed"]
    env.close()
    env.close()
    assert events == ["opened", "env closed", "env closed", "shut"]
    assert threading.active_count() == before


def test_the_worlds_fault_is_raised_and_the_next_episode_can_begin() -> None:
    env = agentrl.as_gymnasium(Walk)
    env.reset(seed=1)
    with pytest.raises(InfraError, match="the ice broke"):
        env.step("fault")
    assert env.reset(seed=2)[0][0]["content"] == "train 2"
    env.close()


def test_what_cannot_be_opened_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(UserError, match=r"env 'prompts' needs a (value|dataset)"):
        agentrl.as_gymnasium("prompts")
    with pytest.raises(ContractError, match="an EnvSpec has its settings; latency_s"):
        agentrl.as_gymnasium(EnvSpec("shop"), latency_s=1.0)
    assert threading.active_count() == before


def test_registered_with_gymnasium() -> None:
    ids = agentrl.register_gymnasium()
    assert {"agentrl/math-tools-v0", "agentrl/shop-v0", "agentrl/prompts-v0"} <= set(ids)
    assert agentrl.register_gymnasium() == ids  # and again, without a warning
    env = gymnasium.make("agentrl/math-tools-v0", level=1)
    observation, _ = env.reset(seed=5)
    assert observation[1]["content"] == math_tasks.draw(5, split="train", level=1).question
    answer = math_tasks.draw(5, split="train", level=1).answer
    assert env.step(f"\\boxed{{{answer}}}")[1] == 1.0
    check_env(env.unwrapped)
    env.close()


class Clock(ToolEnv):
    @tool
    async def now(self) -> int:
        """The time."""
        return 12

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return self.ask("What time is it?"), {}


async def test_it_works_where_an_event_loop_runs_already() -> None:
    env = agentrl.as_gymnasium(Clock)
    env.reset(seed=0)
    assert env.step(call("now"))[0][0]["content"] == "12"
    env.close()


def test_spaces() -> None:
    for space in (MessageSpace(seed=1), TextSpace(seed=1)):
        assert space.sample() in space
        assert not space.is_np_flattenable
    assert [{"role": "user", "content": "é 東京"}] in MessageSpace()
    assert "é 東京" in TextSpace()
    assert [{"role": "user"}] not in MessageSpace()
    assert 3 not in TextSpace()


def test_a_forgotten_close_does_not_hold_up_the_process() -> None:
    code = (
        "import agentrl; e = agentrl.as_gymnasium('shop'); e.reset(seed=1); import sys; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"


def test_without_the_package_the_sentence_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "import agentrl\n"
        "try: agentrl.register_gymnasium\n"
        "except agentrl.UserError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "agentrl.register_gymnasium needs the package gymnasium: pip install 'agentrl-gym[gym]'" in done.stdout
