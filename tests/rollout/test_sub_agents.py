"""The tool ``spawn``: a sub-agent is a thread of the episode, in exact tokens, and its answer is the tool's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from agentrl import EnvSpec, Step, ToolEnv, Trajectory, tool
from agentrl.credit import record_held_out
from agentrl.errors import ConfigError, InfraError
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.runs import reader
from agentrl.runs.replay import replay_episode
from agentrl.runs.rescore import rescore_episodes
from agentrl.runs.writer import write_episodes
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.tools.spawn import spawn
from agentrl.types import Group, Reply, Stop, ThreadRole

pytestmark = pytest.mark.anyio
ADD = call("add", a=1, b=2)


class Sums(ToolEnv):
    """Asks for a sum."""

    max_turns = 4
    system_prompt = "Be brief."
    tools = (spawn,)

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.ask("What is 1 + 2?"), {}

    @tool
    async def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"right": float(trajectory.answer == "3")}


def says(main: list[str], *children: list[str]) -> ScriptedEngine:
    """Make an engine that says one script to the episode itself, and others to its sub-agents in their order."""

    def text(session: str, turn: int) -> str:
        _, sub, branch = session.partition(".sub")
        script = children[int(branch[1:] or 0)] if sub else main
        return script[min(turn, len(script) - 1)]

    return ScriptedEngine(text)


async def play(engine: ScriptedEngine, env: type[ToolEnv] = Sums, **limits: Any) -> Trajectory:
    spec = EnvSpec(env)
    async with spec.open():
        return await Rollout(spec, engine, ByteRenderer(), EpisodeLimits(**limits)).episode(1)


def ask(*tasks: str) -> str:
    return "".join(call("spawn", task=task) for task in tasks)


async def test_a_sub_agent_plays_with_the_tools_and_its_answer_is_the_tools() -> None:
    engine = says([ask("add 1 and 2"), "3"], [ADD, "it is 3"])
    done = await play(engine)
    assert (done.reward, done.stop, done.turns, len(done.contexts)) == (1.0, Stop.TERMINATED, 4, 2)
    assert done.messages[-2]["content"] == "it is 3"
    main, child = done.threads
    assert (main.role, main.turns, child.role, child.turns) == (ThreadRole.MAIN, (0, 3), ThreadRole.SUB_AGENT, (1, 2))
    assert (child.parent, child.after) == (0, 0)
    assert [m["content"] for m in child.messages[:2]] == ["Be brief.", "add 1 and 2"]
    assert [(c.turn, c.name, c.status) for c in done.calls] == [(2, "add", "ok"), (0, "spawn", "ok")]
    assert len(done.step_rewards) == 4


async def test_every_turn_is_sampled_in_the_context_that_is_trained() -> None:
    engine = says([ask("one", "two"), ADD, "3"], [ADD, "first"], [ADD, ADD, "second"])
    done = await play(engine)
    seen = {tuple(context) for context in engine.contexts}
    for segments in done.contexts:
        tokens: list[int] = []
        for segment in segments:
            if segment.author == "model":
                assert tuple(tokens) in seen
                seen.discard(tuple(tokens))
            tokens += segment.token_ids
    assert not seen
    assert sorted(n for thread in done.threads for n in thread.turns) == list(range(done.turns))
    told = [m["content"] for m in done.messages if m["role"] == "tool"]
    assert told == ["first", "second", "3"]


async def test_a_sub_agent_has_no_sub_agents() -> None:
    engine = says([ask("spawn more"), "3"], [ask("deeper"), "no"])
    done = await play(engine)
    assert len(done.threads) == 2
    (refused,) = [m["content"] for m in done.threads[1].messages if m["role"] == "tool"]
    assert refused.startswith("error: there is no sub-agent here")


@pytest.mark.parametrize(
    ("child", "limits", "told"),
    [
        ([ADD], {}, "error: the sub-agent ran out of turns; it said last: nothing"),
        (["a long answer that is cut"], {"max_tokens": 100}, "error: the sub-agent ran out of tokens; it said last: "),
    ],
)
async def test_a_sub_agent_that_comes_to_no_end_is_told_to_the_model(
    child: list[str], limits: dict[str, Any], told: str
) -> None:
    text = child[0] * (1 if child[0] == ADD else 9)
    done = await play(says([ask("go"), "3"], [text]), **limits)
    (message,) = [m for m in done.messages if m["role"] == "tool"]
    assert message["content"].startswith(told)
    assert message["is_error"]
    assert next(c for c in done.calls if c.name == "spawn").failed
    assert done.reward == 1.0


async def test_the_tokens_of_sub_agents_are_the_episodes() -> None:
    done = await play(says([ask("one"), ask("two"), "3"], ["word " * 20], ["word " * 20]), max_episode_tokens=250)
    behind = [len(s.token_ids) for s in done.segments if s.author != "prompt"]
    assert (done.stop, sum(len(t.turns) for t in done.threads[1:])) == (Stop.MAX_TOKENS, 1)
    assert sum(behind) >= 250
    assert done.sampled_tokens <= 250


async def test_the_engines_time_with_sub_agents_is_the_engines() -> None:
    """An engine that is slow is the world's fault, and not what a call of the model's brought about."""
    engine = says([ask("one", "two"), "3"], ["first"], ["second"])
    engine.latency_s = 0.2
    done = await play(engine)
    assert done.timings["generate"] >= 3 * 0.19
    assert 0.0 <= done.timings["tools"] < done.timings["generate"]
    engine = says([ask("one"), "3"], ["first"])
    generate = engine.generate

    async def be_slow_for_sub_agents(*given: Any, **named: Any) -> Any:
        engine.latency_s = 60.0 if ".sub" in named["session"] else 0.0
        return await generate(*given, **named)

    engine.generate = be_slow_for_sub_agents  # type: ignore[method-assign]
    late = await play(engine, episode_timeout_s=0.5, turn_timeout_s=0.4)
    assert late.fault is not None
    assert (late.stop, late.fault.provoked) == (Stop.TIMEOUT, False)


async def test_a_call_that_is_wrong_is_the_environments_to_refuse() -> None:
    done = await play(says([call("spawn", job="go"), "3"]))
    (message,) = [m for m in done.messages if m["role"] == "tool"]
    assert message["content"].startswith("error: ")
    assert done.threads == ()


async def test_calls_of_a_turn_are_answered_in_their_order() -> None:
    done = await play(says([ADD + ask("one") + ADD, "3"], ["first"]))
    assert [m["content"] for m in done.messages if m["role"] == "tool"] == ["3", "first", "3"]


class Ends(Sums):
    """Ends by a step."""

    async def step(self, action: Reply) -> Step:
        step = await super().step(action)
        return step._replace(reward=0.5, terminated=True) if action.tool_calls else step


async def test_a_step_of_a_sub_agent_may_end_the_episode_and_be_worth_something() -> None:
    done = await play(says([ask("go"), "3"], [ADD, "never said"]), Ends)
    assert (done.stop, done.turns) == (Stop.TERMINATED, 2)
    assert done.step_rewards == (0.0, 0.5)


class Checked(Sums):
    """One whose world works."""

    async def health_check(self) -> None: ...


@pytest.mark.parametrize(("error", "kind"), [("away", "endpoint_failed"), ("slow", "episode_timeout")])
async def test_an_engine_that_fails_or_is_slow_beneath_a_sub_agent_is_the_worlds(error: str, kind: str) -> None:
    engine = says([ask("one"), "3"], ["first"])
    generate = engine.generate

    async def fail_for_sub_agents(*given: Any, **named: Any) -> Any:
        if ".sub" in named["session"]:
            if error == "away":
                raise InfraError("endpoint_failed", "the engine's server is away")
            await anyio.sleep(600)
        return await generate(*given, **named)

    engine.generate = fail_for_sub_agents  # type: ignore[method-assign]
    done = await play(engine, Checked, **({"episode_timeout_s": 1.0} if error == "slow" else {}))
    assert done.fault is not None
    assert (done.fault.kind, done.fault.provoked, done.reward) == (kind, False, None)


class Breaks(Sums):
    """Breaks in a step."""

    async def step(self, action: Reply) -> Step:
        raise RuntimeError("the world broke")


async def test_an_environment_that_breaks_beneath_a_sub_agent_is_a_fault() -> None:
    done = await play(says([ask("go"), "3"], [ADD]), Breaks)
    assert done.fault is not None
    assert done.fault.kind == "env_step"
    assert done.reward is None


async def test_sessions_of_the_engine_end_with_the_episode() -> None:
    engine = says([ask("one", "two"), "3"], ["first"], ["second"])
    await play(engine)
    assert set(engine.turns) <= set(engine.ended)


async def test_what_it_played_is_stored_and_read_back(tmp_path: Any) -> None:
    done = await play(says([ask("one"), "3"], [ADD, "first"]))
    write_episodes(tmp_path / "x.parquet", 1, "train", record_held_out([Group(1, (done,))]))
    ((_, row),) = reader.read_rows(tmp_path / "x.parquet")
    assert reader.build_trajectory(row).threads == done.threads


async def test_without_a_sub_agent_an_episode_is_as_it_was() -> None:
    done = await play(says([ADD, "3"]))
    assert (done.threads, done.turns, [c.turn for c in done.calls]) == ((), 2, [0])


async def test_it_does_not_go_with_folded_contexts() -> None:
    from agentrl.rollout.folding import Folding, fold

    spec = EnvSpec(Sums)
    async with spec.open():
        rollout = Rollout(spec, says([ask("one"), "3"], ["first"]), ByteRenderer())
        rollout.folding = Folding(fold, 5000)
        with pytest.raises(ConfigError, match=r"spawn and rollout\.context fold"):
            await rollout.episode(1)


@pytest.mark.parametrize(
    "children",
    [[[ADD, "first"]], [[ADD, "first"], [ADD, ADD, "second"]], [["first"], ["second"], [ADD, "third"]]],
)
async def test_an_episode_with_sub_agents_is_replayed_token_by_token(children: list[list[str]]) -> None:
    done = await play(says([ask(*map(str, range(len(children)))), ADD, "3"], *children))
    spec = EnvSpec(Sums)
    async with spec.open():
        again = await replay_episode(Rollout(spec, ScriptedEngine(["never"]), ByteRenderer()), done)
    assert (again.differs, again.called) == ("", 0)
    assert again.after.segments == done.segments


async def test_sub_agents_with_the_same_task_that_say_the_same_are_two() -> None:
    done = await play(says([ask("one", "one"), "3"], [ADD, "first"], [ADD, "first"]))
    assert [(t.role, len(t.turns)) for t in done.threads[1:]] == [(ThreadRole.SUB_AGENT, 2)] * 2
    assert [c[0].author for c in done.contexts] == ["prompt"] * 3
    assert [s.author for s in done.contexts[1]] == [s.author for s in done.contexts[2]]


class Counts(Sums):
    """Counts what is added, and scores that."""

    def __init__(self) -> None:
        self.added = 0

    @tool
    async def add(self, a: int, b: int) -> int:
        """Add."""
        self.added += a
        return a + b

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"added": float(self.added)}


async def test_what_sub_agents_did_to_the_environment_is_done_again_when_it_is_scored_again() -> None:
    done = await play(says([ask("one"), ADD + ask("two"), "3"], [ADD, "first"], [ADD, ADD, "second"]), Counts)
    assert done.reward == 4.0
    spec = EnvSpec(Counts)
    async with spec.open():
        where = reader.parse_episode_id("1:0")
        (scored,) = [one async for one in rescore_episodes(spec, [[(where, done)]], act=True)]
    assert scored.reward == 4.0
