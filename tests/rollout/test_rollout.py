"""Play: whose token is whose, no barriers, and where each kind of mistake ends up."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Env, EnvSpec, InfraError, Reply, Step, Tool, ToolEnv, ToolError, Trajectory, tool
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.testing import STOP, ByteRenderer, ScriptedEngine, call, decode_text
from agentrl.types import Completion, Observation, SamplingParams, Stop


@tool
async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


class Quiz(ToolEnv):
    """Adds; right when the answer ends with 5."""

    system_prompt = "Add."
    tools: Sequence[Tool] = (add,)
    max_turns = 4
    closed = 0

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self.seed, self.options = seed, options
        return self.ask(f"Question {seed}"), {"split": (options or {})["split"]}

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"correct": float(trajectory.answer.endswith("5"))}

    async def close(self) -> None:
        type(self).closed += 1


def rollout(env: type[Env], script: Any = ("five is 5",), **more: Any) -> Rollout:
    limits = {k: more.pop(k) for k in list(more) if k in EpisodeLimits.__dataclass_fields__}
    engine = script if hasattr(script, "generate") else ScriptedEngine(script)
    return Rollout(EnvSpec(env), engine, ByteRenderer(), limits=EpisodeLimits(**limits), **more)


TURN = st.one_of(
    st.text(max_size=8),
    st.builds(lambda a, b: call("add", a=a, b=b), st.integers(), st.integers()),
    st.just("<tool_call>{</tool_call>"),
    st.lists(st.just(call("add", a=1, b=2)), min_size=2, max_size=3).map("".join),
)


@given(st.lists(TURN, min_size=1, max_size=5), st.integers(1, 60))
def test_the_context_is_the_concatenation_of_the_segments(script: list[str], budget: int) -> None:
    engine = ScriptedEngine(script)
    play = rollout(Quiz, engine, max_tokens=budget)
    t = anyio.run(play.episode, 3)
    ends = [i for i, s in enumerate(t.segments) if s.author == "model"]
    assert engine.contexts == [[x for s in t.segments[:i] for x in s.token_ids] for i in ends]
    for turn, i in enumerate(ends):
        said = script[min(turn, len(script) - 1)]
        assert t.segments[i].token_ids == (*said.encode(), STOP)[:budget]  # as sampled, never encoded again
    assert t.loss_mask == [int(s.author == "model") for s in t.segments for _ in s.token_ids]
    assert [s.author for s in t.segments[:2]] == ["prompt", "model"]
    assert t.fault is None


async def test_an_episode_from_question_to_reward() -> None:
    t = await rollout(Quiz, [call("add", a=2, b=3), "It is 5"], options={"level": 2}, split="test").episode(7)
    assert [m["role"] for m in t.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert t.messages[3]["content"] == "5"
    assert [s.author for s in t.segments] == ["prompt", "model", "env", "model"]
    assert decode_text(t.segments[2].token_ids) == "5"
    assert (t.task, t.stop, t.reward, t.rewards, t.turns) == (7, Stop.TERMINATED, 1.0, {"correct": 1.0}, 2)
    assert t.info == {"split": "test"}
    assert [(c.turn, c.name, c.status) for c in t.calls] == [(0, "add", "ok")]
    assert set(t.timings) == {"reset", "render", "generate", "tools", "score", "total"}
    assert set(t.logprobs) == {-0.5, 0.0}


async def test_the_models_mistakes_are_answered_and_it_goes_on() -> None:
    mistakes = [call("ad", a=1), call("add", a=1), "<tool_call>oops</tool_call>", "5"]
    t = await rollout(Quiz, mistakes).episode(0)
    told = [m["content"] for m in t.messages if m["role"] == "tool"]
    assert told[0] == "error: unknown tool 'ad'; the tools are: add"
    assert told[1].startswith("error: bad arguments for add: b: ")
    assert told[2].startswith("error: invalid JSON")
    assert (t.reward, t.fault, [c.status for c in t.calls]) == (
        1.0,
        None,
        ["unknown_tool", "arguments", "parse"],
    )


async def test_half_a_character_in_a_call_is_a_mistake_like_any_other() -> None:
    @tool
    async def echo(word: str) -> str:
        """Say no."""
        raise ToolError(f"not {word}")

    class Echo(Quiz):
        tools = (echo,)

    t = await rollout(Echo, ['<tool_call>{"name": "echo", "arguments": {"word": "\\ud800"}}</tool_call>', "5"]).episode(
        0
    )
    assert (t.fault, t.reward) == (None, 1.0)
    assert t.messages[3]["content"] == "error: not ?"


# ---- where an episode stops


async def test_turns_run_out() -> None:
    t = await rollout(Quiz, [call("add", a=1, b=2)]).episode(0)
    assert (t.stop, t.turns, t.reward) == (Stop.MAX_TURNS, 4, 0.0)
    t = await rollout(Quiz, [call("add", a=1, b=2)], max_turns=2).episode(0)
    assert (t.stop, t.turns) == (Stop.MAX_TURNS, 2)


async def test_tokens_of_a_turn_run_out() -> None:
    t = await rollout(Quiz, ["a long answer: 5"], max_tokens=6).episode(0)
    assert (t.stop, t.sampled_tokens, t.reward) == (Stop.MAX_TOKENS, 6, 0.0)


async def test_the_context_runs_out() -> None:
    engine = ScriptedEngine([call("add", a=1, b=2)], max_context=100)
    t = await rollout(Quiz, engine).episode(0)
    assert (t.stop, len(t.token_ids), t.fault) == (Stop.MAX_TOKENS, 100, None)
    engine = ScriptedEngine([call("add", a=1, b=2)], max_context=len(t.segments[0].token_ids) + 1)
    t = await rollout(Quiz, engine).episode(0)
    assert (t.stop, t.sampled_tokens) == (Stop.MAX_TOKENS, 1)


async def test_a_prompt_that_does_not_fit_is_nobodys_failure() -> None:
    t = await rollout(Quiz, ScriptedEngine(["5"], max_context=10)).episode(0)
    assert t.fault is not None
    assert (t.fault.kind, t.reward, t.turns) == ("prompt_too_long", None, 0)
    assert "the prompt of task 0 has" in t.fault.message


@pytest.mark.parametrize(("terminated", "stop"), [(True, Stop.TERMINATED), (False, Stop.TRUNCATED)])
async def test_the_environment_ends_it_and_may_say_why(terminated: bool, stop: Stop) -> None:
    class Ending(Quiz):
        async def step(self, action: Reply) -> Step:
            return Step("the end", 0.25, terminated, not terminated, {"why": "over"})

    t = await rollout(Ending).episode(0)
    assert (t.stop, t.step_rewards, t.info["why"], t.messages[-1]["content"]) == (stop, (0.25,), "over", "the end")
    assert t.segments[-1].author == "model"  # what nobody will answer is not in the context


async def test_step_rewards_are_the_default_score() -> None:
    class Steps(Env):
        max_turns = 3

        async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
            return "go", {}

        async def step(self, action: Reply) -> Step:
            return Step("and", 0.5, False, False, {})

    t = await rollout(Steps).episode(0)
    assert (t.step_rewards, t.reward) == ((0.5, 0.5, 0.5), 1.5)


@pytest.mark.parametrize("scored", [{"a": None}, {}])
async def test_a_missing_reward_is_never_filled_in(scored: dict[str, None]) -> None:
    class Silent(Quiz):
        async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
            return dict(scored)

    t = await rollout(Silent).episode(0)
    assert (t.reward, t.fault, dict(t.rewards)) == (None, None, scored)


# ---- no barriers


async def test_episodes_do_not_wait_for_each_other() -> None:
    at_once, most = 0, 0

    @tool
    async def slow(n: int) -> str:
        """Slow."""
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await anyio.sleep(0.5)  # so long that a busy machine begins them all
        at_once -= 1
        return "ok"

    class Slow(Quiz):
        tools = (slow,)

    begun = anyio.current_time()
    groups = await rollout(Slow, [call("slow", n=1)] * 2 + ["5"]).batch(range(16), 8)
    assert most == 128
    assert anyio.current_time() - begun < 128 * 2 * 0.5 / 3  # serial: 128 s
    assert [g.task for g in groups] == list(range(16))
    assert {t.turns for g in groups for t in g} == {3}


async def test_a_quick_episode_is_done_while_a_slow_one_plays() -> None:
    order: list[int] = []

    class Uneven(Quiz):
        async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
            await anyio.sleep(0.1 * (seed == 0))
            return "go", {}

    await rollout(Uneven).batch([0, 1], 2, on_episode=lambda t: order.append(t.task))
    assert order == [1, 1, 0, 0]


async def test_a_stuck_thread_and_a_stubborn_tool_stop_nobody_else() -> None:
    release, loop_release = threading.Event(), anyio.Event()

    @tool(timeout_s=0.05)
    def stuck() -> None:
        """Never returns."""
        release.wait(60)

    @tool(timeout_s=0.05)
    async def stubborn() -> None:
        """Will not be cancelled."""
        while not loop_release.is_set():
            try:
                await loop_release.wait()
            except BaseException:
                continue

    class Stuck(Quiz):
        tools = (stuck, stubborn, add)

    def script(session: str, turn: int) -> str:
        return {"0": call("stuck"), "1": call("stubborn")}.get(session.split("-")[0], "5")

    ended: list[int] = []
    try:
        with anyio.fail_after(60):
            groups = await rollout(Stuck, script).batch([0, 1, 2], 2, on_episode=lambda t: ended.append(t.task))
    finally:
        release.set()
        loop_release.set()
    assert ended[:2] == [2, 2]
    assert [[t.fault and t.fault.kind for t in g] for g in groups] == [["tool_timeout"] * 2] * 2 + [[None, None]]


# ---- the same seeds


class Dice(ScriptedEngine):
    """Remembers the seeds it was given."""

    def __init__(self) -> None:
        super().__init__([call("add", a=1, b=2), "5"])
        self.seeds: list[int] = []

    async def generate(self, token_ids: Any, params: SamplingParams, *, session: str) -> Completion:
        self.seeds.append(params.seed)
        return await super().generate(token_ids, params, session=session)


async def test_every_turn_has_its_own_seed_and_a_run_can_be_repeated() -> None:
    thrown = []
    for seed in (0, 0, 1):
        engine = Dice()
        await rollout(Quiz, engine).batch([4, 5, 4], 3, seed=seed)  # a task given twice is not played twice alike
        assert len(set(engine.seeds)) == len(engine.seeds) == 18
        thrown.append(set(engine.seeds))
    assert thrown[0] == thrown[1]
    assert not thrown[0] & thrown[2]
    alone = Dice()
    await rollout(Quiz, alone).batch([5], 3, seed=0)
    assert set(alone.seeds) <= thrown[0]  # whatever plays beside it


async def test_the_engine_is_told_the_stops_and_how_much_room_there_is() -> None:
    asked: list[SamplingParams] = []

    class Curious(ScriptedEngine):
        async def generate(self, token_ids: Any, params: SamplingParams, *, session: str) -> Completion:
            asked.append(params)
            return await super().generate(token_ids, params, session=session)

    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5)
    play = rollout(Quiz, Curious(["5"], max_context=100), sampling=sampling, max_tokens=512)
    t = await play.episode(0)
    (params,) = asked
    assert params.stop_token_ids == (STOP,)
    assert params.max_tokens == 100 - len(t.segments[0].token_ids)
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.9, 5)


async def test_an_episode_is_limited_behind_its_prompt_and_tools_tokens_count() -> None:
    said = call("add", a=2, b=3)
    free = await rollout(Quiz, [said]).episode(0)
    prompt, first, answer = (len(s.token_ids) for s in free.segments[:3])
    for limit, turns in ((first - 1, [first - 1]), (first + answer, [first]), (first + answer + 7, [first, 7])):
        t = await rollout(Quiz, [said], max_episode_tokens=limit).episode(0)
        assert t.stop is Stop.MAX_TOKENS
        assert [len(s.token_ids) for s in t.segments if s.author == "model"] == turns
        assert len(t.token_ids) <= prompt + max(limit, first + answer)


async def test_the_worlds_fault_is_in_the_trajectory_and_its_kind_is_kept() -> None:
    class Down(Quiz):
        async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
            raise InfraError("server_down", "503")

    t = await rollout(Down).episode(0)
    assert t.fault is not None
    assert (t.stop, t.fault.kind, t.fault.message, t.reward) == (Stop.FAULT, "server_down", "503", None)
