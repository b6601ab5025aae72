"""What goes wrong in an episode: the world's failures are counted, the author's and ours stop the run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import pytest

from agentrl import ContractError, Env, EnvSpec, Reply, Step, ToolEnv, Trajectory, UserError, tool
from agentrl.credit import assign_credit
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.runs import metrics
from agentrl.spread import Scored
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Completion, Observation, SamplingParams, Stop


class Plain(Env):
    """One turn, right when the model says yes."""

    max_turns = 1
    made = 0
    closed = 0

    def __init__(self) -> None:
        type(self).made += 1

    async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
        return "?", {}

    async def step(self, action: Reply) -> Step:
        return Step([], 0.0, True, False, {})

    async def score(self, trajectory: Trajectory) -> Mapping[str, float | None]:
        return {"yes": float(trajectory.answer == "yes")}

    async def close(self) -> None:
        await anyio.sleep(0.01)  # also when it is cancelled
        type(self).closed += 1


def rollout(env: type[Env], script: Any = ("yes",), **limits: Any) -> Rollout:
    engine = script if hasattr(script, "generate") else ScriptedEngine(script)
    return Rollout(EnvSpec(env), engine, ByteRenderer(), limits=EpisodeLimits(**limits))


def raising(method: str, error: BaseException) -> type[Env]:
    async def fail(self: Env, *_: Any, **__: Any) -> None:
        raise error

    return type("Failing", (Plain,), {method: fail, "made": 0, "closed": 0})


def returning(method: str, result: Any) -> type[Env]:
    async def give(self: Env, *_: Any, **__: Any) -> Any:
        return result

    return type("Odd", (Plain,), {method: give})


def hanging(method: str) -> type[Env]:
    async def hang(self: Env, *_: Any, **__: Any) -> None:
        await anyio.sleep(60)

    return type("Hanging", (Plain,), {method: hang})


# ---- the world's


@pytest.mark.parametrize("method", ["reset", "step", "score", "close"])
@pytest.mark.parametrize("error", [KeyError("row"), TimeoutError("database")])
async def test_an_environment_that_raises_ends_its_episode_only(method: str, error: Exception) -> None:
    env = raising(method, error)
    t = await rollout(env).episode(3)
    assert t.fault is not None
    assert (t.fault.kind, t.stop, t.reward) == (f"env_{method}", Stop.FAULT, None)
    assert f"Failing.{method} of task 3" in t.fault.message
    assert type(error).__name__ in t.fault.message
    assert (env.made, env.closed) == (1, 1 if method != "close" else 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["reset", "step", "score"])
@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3)])
async def test_an_environment_that_cancels_itself_or_exits_is_a_fault_and_is_counted(
    method: str, error: BaseException
) -> None:
    group = await rollout(raising(method, error)).group(3, 2)
    assert [t.fault.kind for t in group if t.fault] == [f"env_{method}"] * 2


@pytest.mark.parametrize("method", ["reset", "step", "score", "close"])
async def test_an_environment_that_hangs_is_given_up_at_the_turns_deadline(method: str) -> None:
    t = await rollout(hanging(method), turn_timeout_s=0.05).episode(0)
    assert t.fault is not None
    assert (t.stop, t.reward) == (Stop.FAULT, None)
    assert f"Hanging.{method} of task 0 took over 0.05 s" in t.fault.message


async def test_the_episodes_deadline_says_where_it_was() -> None:
    t = await rollout(hanging("step"), turn_timeout_s=60, episode_timeout_s=0.05).episode(0)
    assert t.fault is not None
    assert (t.stop, t.fault.kind, t.reward) == (Stop.TIMEOUT, "episode_timeout", None)
    assert t.fault.message == "over 0.05 s, in Hanging.step of task 0"
    t = await rollout(Plain, ScriptedEngine(["yes"], latency_s=60), episode_timeout_s=0.05).episode(0)
    assert t.fault is not None
    assert t.fault.message == "over 0.05 s, in generate of task 0"


async def test_a_constructor_that_raises_is_a_fault_of_the_reset() -> None:
    class Unmade(Plain):
        def __init__(self) -> None:
            raise OSError("no database")

    t = await rollout(Unmade).episode(0)
    assert t.fault is not None
    assert t.fault.kind == "env_reset"


async def test_a_faulted_episode_is_in_no_statistic_and_its_group_goes_on() -> None:
    tries: list[str] = []

    async def down() -> None:
        raise OSError("no route to the index")

    @tool(timeout_s=0.02, retries=1, health_check=down)
    async def search(query: str) -> str:
        """Search."""
        tries.append(query)
        await anyio.sleep(60 if query == "slow" else 0)
        return "found"

    class Search(ToolEnv):
        tools = (search,)

        async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
            return "?", {}

        async def score(self, trajectory: Trajectory) -> dict[str, float]:
            return {"long": float(len(trajectory.answer))}

    said = iter(["slow", "quick", "quick", "quick"])
    first: dict[str, str] = {}

    def script(session: str, turn: int) -> str:
        first.setdefault(session, next(said, ""))
        return call("search", query=first[session]) if turn == 0 else "x" * (len(first) + 1)

    (group,) = await rollout(Search, script).batch([0], 4)
    faulted = [t for t in group if t.fault]
    assert [t.fault.kind for t in faulted if t.fault] == ["tool_timeout"]
    assert tries.count("slow") == 2
    assert len(group.scored) == 3
    found = metrics.group_metrics([group])
    assert found["reward"] == found["rewards/long/mean"] == 5.0
    assert found["faults/tool_timeout"] == 1.0
    assert found["tools/search/timeouts"] == 1.0
    assert found["tools/call_frequency"] == 1.0
    asked: list[list[float | None]] = []

    def advantage(groups: Sequence[Sequence[Scored]]) -> list[list[float]]:
        asked.extend([m.reward for m in group] for group in groups)
        return [[1.0] * len(group) for group in groups]

    credit = assign_credit([group], advantage, reduce=lambda lengths: [1.0] * len(lengths))
    assert [len(s.token_ids) > 0 for s in credit.samples()] == [True] * 3
    assert asked == [[5.0] * 3]


# ---- the author's

FINE = {"role": "user", "content": "?"}


@pytest.mark.parametrize(
    ("method", "result", "sentence"),
    [
        ("reset", "?", r"Odd.reset must return \(observation, info\), info a dict; got '\?'"),
        ("reset", ("?", None), r"Odd.reset must return \(observation, info\), info a dict"),
        ("reset", (3, {}), "Odd.reset returned the observation 3; it must be a str, or a list of messages"),
        ("reset", ([{"role": "user"}], {}), "Odd.reset returned the observation .*'content'"),
        ("reset", ([{"role": "robot", "content": ""}], {}), "the role one of system, user, assistant, tool"),
        ("reset", ([{"role": "user", "content": ["image"]}], {}), "Odd.reset returned the observation"),
        ("reset", ([], {}), "Odd.reset returned no message"),
        ("step", None, r"Odd.step must return \(observation, reward, terminated, truncated, info\); got None"),
        ("step", ("?", 0.0, True, {}), "Odd.step must return .*; got "),
        ("step", (None, 0.0, True, False, {}), "Odd.step returned the observation None"),
        ("step", ("?", None, True, False, {}), "Odd.step returned the reward None, which is no finite number"),
        ("step", ("?", "1", True, False, {}), "Odd.step returned the reward '1'"),
        ("step", ("?", math.nan, True, False, {}), "Odd.step returned the reward nan"),
        ("step", ("?", 10**400, True, False, {}), "which is no finite number"),
        ("step", ("?", 0.0, "no", False, {}), "Odd.step returned terminated 'no' and truncated False; each is a bool"),
        ("step", ("?", 0.0, True, None, {}), "truncated None; each is a bool"),
        ("step", ("?", 0.0, True, False, None), "Odd.step returned info None, which is no dict"),
        ("step", ([], 0.0, False, False, {}), "Odd.step neither ended the episode nor returned a message"),
        ("score", 1.0, "Odd.score must return a dict of named rewards; got 1.0"),
        ("score", None, "Odd.score must return a dict of named rewards; got None"),
        ("score", {"yes": "1"}, "Odd.score returned '1' for 'yes'; a reward is a finite number, or None"),
        ("score", {"yes": math.nan}, "Odd.score returned nan for 'yes'"),
        ("score", {"yes": math.inf}, "Odd.score returned inf for 'yes'"),
        ("score", {"yes": [1.0]}, r"Odd.score returned \[1.0\] for 'yes'"),
    ],
)
async def test_what_an_environment_may_not_return(method: str, result: Any, sentence: str) -> None:
    with pytest.raises(ContractError, match=sentence):
        await rollout(returning(method, result)).batch([0], 2)


async def test_numbers_of_any_kind_are_rewards() -> None:
    import numpy as np

    t = await rollout(returning("score", {"a": np.float32(0.5), "b": True, "c": 2})).episode(0)
    assert t.rewards == {"a": 0.5, "b": 1.0, "c": 2.0}
    assert {type(r) for r in t.rewards.values()} == {float}
    t = await rollout(returning("step", ("?", np.float64(1), np.bool_(True), False, {}))).episode(0)
    assert t.stop is Stop.TERMINATED


@pytest.mark.parametrize("method", ["reset", "step", "score", "close"])
async def test_a_method_that_is_not_async_is_told_in_a_sentence(method: str) -> None:
    env = type("Sync", (Plain,), {method: lambda self, *_, **__: ("?", {})})
    with pytest.raises(ContractError, match=rf"Sync\.{method} must be `async def`; it returned \('\?', {{}}\)"):
        await rollout(env).batch([0], 2)


async def test_a_tool_result_that_is_no_json_stops_the_run() -> None:
    @tool
    async def bad() -> set[int]:
        """Bad."""
        return {1}

    class Bad(ToolEnv):
        tools = (bad,)

        async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
            return "?", {}

    with pytest.raises(ContractError, match=r"tool 'bad' returned \{1\} .*neither text nor JSON"):
        await rollout(Bad, [call("bad")]).batch([0], 2)


# ---- ours


class Broken(ScriptedEngine):
    def __init__(self, error: Exception) -> None:
        super().__init__(["yes"])
        self.error = error

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), TimeoutError("engine"), UserError("no")])
async def test_the_engines_errors_are_ours_and_close_everything(error: Exception) -> None:
    env = type("Closing", (Plain,), {"made": 0, "closed": 0})
    engine = Broken(error)
    with pytest.raises(type(error), match=str(error)):
        await rollout(env, engine).batch(range(3), 2)
    assert env.made == env.closed == len(engine.ended) == 6  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["render_ids", "render_appended", "parse_response"])
async def test_the_renderers_errors_are_ours(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise LookupError("no such template")

    class Chatty(Plain):
        max_turns = 2

        async def step(self, action: Reply) -> Step:
            return Step("more", 0.0, False, False, {})

    play = rollout(Chatty)
    monkeypatch.setattr(play.renderer, method, fail)
    with pytest.raises(LookupError, match="no such template"):
        await play.episode(0)


async def test_a_renderer_that_rewrites_history_is_caught() -> None:
    class Chatty(Plain):
        max_turns = 2

        async def step(self, action: Reply) -> Step:
            return Step("more", 0.0, False, False, {})

    class Whole(ByteRenderer):
        render_appended: Any = None  # what it puts behind a turn is read off the whole

        def bridge_to_next_turn(
            self, prompt_ids: Any, completion_ids: Any, messages: Any, *, tools: Any = ()
        ) -> list[int]:
            return [*prompt_ids, 0, 1, 2]

    play = rollout(Chatty)
    play.renderer = Whole()
    with pytest.raises(ContractError, match="changed tokens that were already in the context"):
        await play.episode(0)


async def test_cancelling_a_batch_closes_every_environment_and_ends_every_session() -> None:
    env = type("Closing", (Plain,), {"made": 0, "closed": 0})
    engine = ScriptedEngine(["yes"], latency_s=60)
    with anyio.move_on_after(0.1) as scope:
        await rollout(env, engine).batch(range(10), 4)
    assert scope.cancelled_caught
    assert env.made == env.closed == len(engine.ended) == 40  # type: ignore[attr-defined]
    assert len(set(engine.ended)) == 40


async def test_one_broken_contract_stops_the_others_at_once() -> None:
    class Mixed(Plain):
        async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
            if seed:
                await anyio.sleep(60)
            return "?", {}

        async def score(self, trajectory: Trajectory) -> Any:
            return 1.0

    with anyio.fail_after(60), pytest.raises(ContractError, match=r"Mixed\.score must return a dict"):
        await rollout(Mixed).batch([0, 1], 1)
