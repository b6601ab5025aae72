"""Episodes that agents play: each sampled token is trained once, in the context it was sampled in, whatever they do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from agentrl import Env, EnvSpec, Reply, Step, ToolEnv, Trajectory, UserError, tool
from agentrl.agents.agent import AgentTask
from agentrl.errors import InfraError
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call, decode_text
from agentrl.types import Stop
from tests.helpers.agents import Client, Sums, failing_engine, play, rolling_out, solve

pytestmark = pytest.mark.anyio
ADD = call("add", a=1, b=1)


def trained(trajectory: Trajectory) -> list[str]:
    """List the texts that are trained."""
    return [decode_text(s.token_ids) for s in trajectory.segments if s.author == "model"]


def check_contexts(trajectory: Trajectory, engine: ScriptedEngine) -> None:
    """Each trained turn stands behind the very tokens that the engine was given for it, and is trained once."""
    found = []
    for context in trajectory.contexts:
        before: list[int] = []
        for segment in context:
            if segment.author == "model":
                found.append(before.copy())
            before += segment.token_ids
    assert all(context in engine.contexts for context in found)
    assert len(found) == trajectory.turns


BROKEN = "<tool_call>{broken</tool_call>"
NO_OBJECT = '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'


@pytest.mark.parametrize(
    ("script", "invalid"),
    [
        ([ADD, call("subtract", a=1), BROKEN, "right"], 1),
        ([BROKEN, BROKEN, NO_OBJECT, NO_OBJECT, "right"], 4),  # ids of calls are made of their turns' words
        ([ADD, ADD, ADD + ADD, ADD + ADD, "right"], 0),
    ],
)
async def test_an_agent_that_plays_as_the_environment_does_gives_the_same_episode(
    script: list[str], invalid: int
) -> None:
    spec = EnvSpec(Sums)
    async with spec.open():
        native = await Rollout(spec, ScriptedEngine(script), ByteRenderer()).episode(1)
    own = await play(solve, script)
    assert own.segments == native.segments
    assert own.messages == native.messages
    assert (own.rewards, own.stop) == (native.rewards, native.stop) == ({"right": 1.0}, Stop.TERMINATED)
    assert [(c.turn, c.name, c.status) for c in own.calls] == [(c.turn, c.name, c.status) for c in native.calls]
    assert own.metrics == {"agent/threads": 1.0, "agent/side_calls": 0.0, "agent/invalid_calls": invalid}


async def test_two_turns_that_say_the_same_have_calls_of_their_own() -> None:
    class Pays(Sums):
        async def step(self, reply: Reply) -> Step:
            return (await super().step(reply))._replace(reward=1.0 if reply.tool_calls else 0.0)

    ids: list[str] = []

    async def ask_for_two(task: AgentTask, client: Client) -> None:
        body = {"messages": list(task.messages), "tools": list(task.tools), "n": 2}
        for choice in (await client.post("/chat/completions", body)).json()["choices"]:
            (one,) = choice["message"]["tool_calls"]
            ids.append(one["id"])
            await client.call("add", one["function"]["arguments"])

    done = await play(ask_for_two, [ADD], env=Pays)
    assert len(set(ids)) == 2
    assert (done.step_rewards, [c.turn for c in done.calls]) == ((1.0, 1.0), [0, 1])


async def test_what_a_client_makes_of_the_history_opens_no_thread() -> None:
    async def careless(task: AgentTask, client: Client) -> None:
        messages: list[Any] = list(task.messages)
        first = await client.chat(messages)
        (one,) = first["tool_calls"]
        function = {"name": "add", "arguments": json.dumps(json.loads(one["function"]["arguments"]), indent=3)}
        again = {
            "role": "assistant",
            "content": " ",
            "tool_calls": [{"id": "x", "type": "function", "function": function}],
        }
        parts = [{"type": "text", "text": "2"}]
        await client.chat([*messages, again, {"role": "tool", "tool_call_id": "x", "content": parts}])

    engine = ScriptedEngine([ADD, "right"])
    done = await play(careless, engine)
    assert len(done.contexts) == 1
    assert trained(done) == [ADD, "right"]
    assert engine.contexts[1][: len(engine.contexts[0])] == engine.contexts[0]
    check_contexts(done, engine)


async def test_a_turn_that_is_gone_on_from_twice_is_trained_once() -> None:
    async def fork(task: AgentTask, client: Client) -> None:
        messages = list(task.messages)
        first = await client.chat(messages)
        for way in ("left", "right"):
            await client.chat([*messages, first, {"role": "user", "content": way}])

    engine = ScriptedEngine(lambda session, turn: f"{session.count('.')}:{turn}")
    done = await play(fork, engine)
    assert len(done.contexts) == 2
    assert len(trained(done)) == done.turns == 3
    assert decode_text(done.contexts[1][0].token_ids) == decode_text(
        engine.contexts[1][: len(done.contexts[1][0].token_ids)]
    )
    check_contexts(done, engine)
    assert done.metrics["agent/threads"] == 2


async def test_sub_agents_side_by_side_do_not_mix() -> None:
    async def boss(task: AgentTask, client: Client) -> None:
        async def work(name: str) -> None:
            messages: list[Any] = [{"role": "user", "content": name}]
            for _ in range(3):
                messages.append(await client.chat(messages))
                messages.append({"role": "user", "content": f"{name} goes on"})

        async with anyio.create_task_group() as tasks:
            for name in ("one", "two"):
                tasks.start_soon(work, name)
        await client.chat(task.messages)

    engine = ScriptedEngine(lambda session, turn: f"{session[-2:]} {turn}", latency_s=0.001)
    done = await play(boss, engine)
    assert len(done.contexts) == 3
    assert sorted(len([s for s in c if s.author == "model"]) for c in done.contexts) == [1, 3, 3]
    assert len(set(trained(done))) == 7
    check_contexts(done, engine)


async def test_a_request_that_is_sent_again_is_sampled_once() -> None:
    async def impatient(task: AgentTask, client: Client) -> None:
        body = {"messages": list(task.messages)}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.post, "/chat/completions", body)
            tasks.start_soon(client.post, "/chat/completions", body)
        again = await client.post("/chat/completions", body, **{"x-stainless-retry-count": "1"})
        assert again.json()["choices"][0]["message"]["content"] == "right"

    engine = ScriptedEngine(["right", "wrong"], latency_s=0.5)
    done = await play(impatient, engine)
    assert trained(done) == ["right"]
    assert len(engine.contexts) == 1


async def test_the_same_words_with_other_tools_are_another_request() -> None:
    async def ask_at_once(task: AgentTask, client: Client) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.chat, task.messages)
            tasks.start_soon(client.chat, task.messages, None)

    done = await play(ask_at_once, ScriptedEngine(["right"], latency_s=0.3))
    assert (done.turns, done.metrics["agent/side_calls"]) == (1, 1)


async def test_who_asks_twice_on_purpose_has_two_samples() -> None:
    async def ask(task: AgentTask, client: Client) -> None:
        body = {"messages": list(task.messages)}
        for _ in range(2):
            await client.post("/chat/completions", body, **{"x-stainless-retry-count": "0"})
        three = await client.post("/chat/completions", body | {"n": 3})
        assert [c["index"] for c in three.json()["choices"]] == [0, 1, 2]

    done = await play(ask, lambda session, turn: f"{session[-1]}{turn}")
    assert len(trained(done)) == len(done.contexts) == 5


async def test_a_client_that_goes_away_leaves_nothing() -> None:
    async def leave(task: AgentTask, client: Client) -> None:
        messages = list(task.messages)
        first = await client.chat(messages)
        more = [*messages, first, {"role": "user", "content": "and?"}]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.chat, more)
            while len(engine.contexts) < 2:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        await client.chat(more)

    engine = ScriptedEngine(lambda session, turn: f"turn {turn}", latency_s=0.0)
    generate = engine.generate

    async def slow_at_first(*given: Any, **named: Any) -> Any:
        engine.latency_s = 600.0 if len(engine.contexts) == 1 else 0.0
        return await generate(*given, **named)

    engine.generate = slow_at_first  # type: ignore[method-assign]
    done = await play(leave, engine)
    assert trained(done) == ["turn 0", "turn 2"]
    assert len(done.contexts) == 1
    check_contexts(done, engine)


async def test_a_title_is_seen_and_not_trained() -> None:
    async def titled(task: AgentTask, client: Client) -> None:
        await client.chat([{"role": "user", "content": "Give this a title"}], tools=None)
        await solve(task, client)

    done = await play(titled, lambda session, turn: "right")
    assert trained(done) == ["right"]
    assert [s.author for s in done.contexts[0]] == ["prompt"]
    assert done.metrics["agent/side_calls"] == 1
    assert done.answer == "right"


@pytest.mark.parametrize(
    ("script", "limits", "stop", "turns"),
    [
        ([ADD], {"max_turns": 2}, Stop.MAX_TURNS, 2),
        (["right" * 10], {"max_tokens": 8}, Stop.MAX_TOKENS, 1),
        ([ADD, ADD, "right"], {"max_episode_tokens": 80}, Stop.MAX_TOKENS, 2),
    ],
)
async def test_the_runs_limits_are_the_agents(script: list[str], limits: Any, stop: Stop, turns: int) -> None:
    done = await play(solve, script, **limits)
    assert (done.stop, done.turns, done.fault) == (stop, turns, None)
    assert done.reward == 0.0


async def test_the_tokens_of_an_episode_are_those_of_all_its_threads() -> None:
    async def begin_anew(task: AgentTask, client: Client) -> None:
        for number in range(12):
            await client.chat([*task.messages, {"role": "user", "content": f"step {number}"}])

    done = await play(begin_anew, ["word " * 19], max_episode_tokens=300)
    assert (done.stop, done.turns, done.sampled_tokens) == (Stop.MAX_TOKENS, 4, 300)


async def test_the_tokens_of_a_request_that_went_away_are_taken_back() -> None:
    async def leave(task: AgentTask, client: Client) -> None:
        messages = [*task.messages, await client.chat(task.messages)]
        more = [*messages, {"role": "user", "content": "long " * 40}]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.chat, more)
            while len(engine.contexts) < 2:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        refused = await client.post("/chat/completions", {"messages": [*more, *more], "tools": task.tools})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        await client.chat([*messages, {"role": "user", "content": "so?"}])

    engine = ScriptedEngine(["so", "never", "right"])
    generate = engine.generate

    async def slow_at_second(*given: Any, **named: Any) -> Any:
        engine.latency_s = 600.0 if len(engine.contexts) == 1 else 0.0
        return await generate(*given, **named)

    engine.generate = slow_at_second  # type: ignore[method-assign]
    done = await play(leave, engine, max_episode_tokens=300)
    assert (done.stop, done.turns, done.reward) == (Stop.TERMINATED, 2, 1.0)


async def test_an_error_behind_a_turn_is_scored_and_one_before_it_is_a_fault() -> None:
    async def late(task: AgentTask, client: Client) -> None:
        await client.chat(task.messages)
        raise ValueError("my parser broke")

    async def early(task: AgentTask, client: Client) -> None:
        raise ValueError("no model configured")

    done = await play(late, ["right"])
    assert (done.stop, done.reward, done.fault) == (Stop.AGENT_ERROR, 1.0, None)
    assert "my parser broke" in done.info["agent_error"]
    lost = await play(early, ["right"])
    assert lost.fault is not None
    assert (lost.fault.kind, lost.reward) == ("agent", None)
    assert "no model configured, before it made a request" in lost.fault.message


@pytest.mark.parametrize("episodes", [16, 4])  # 4: a player's share of a step
async def test_the_same_error_in_half_of_the_episodes_ends_the_run(episodes: int) -> None:
    async def broken(task: AgentTask, client: Client) -> None:
        await client.chat(task.messages)
        raise ValueError("it is me")

    async with rolling_out(broken, ScriptedEngine(["right"]), episodes=episodes) as rollout:
        with pytest.raises(UserError, match="by the same error in 8 of the last 8 episodes: ValueError: it is me"):
            await rollout.batch([1, 2], 8)


async def test_a_failure_of_the_world_is_a_fault_and_the_agent_goes_with_it() -> None:
    ended: list[str] = []

    class Broken(Sums):
        @tool
        async def fetch(self) -> str:
            """Fetch."""
            raise InfraError("network", "the line is down")

    async def ask(task: AgentTask, client: Client) -> None:
        try:
            await client.chat(task.messages)
            await client.post("/agentrl/call", {"name": "fetch", "arguments": {}})
            await anyio.sleep(60)
        finally:
            ended.append("ended")

    done = await play(ask, [call("fetch")], env=Broken)
    assert done.fault is not None
    assert done.fault.kind == "network"
    assert ended == ["ended"]


async def test_an_engine_that_fails_ends_the_run_with_its_error() -> None:
    with pytest.raises(FloatingPointError, match="the logits are no numbers"):
        await play(solve, failing_engine())


async def test_an_environment_that_ends_the_episode_ends_it_for_the_agent() -> None:
    class Submits(Sums):
        async def step(self, reply: Reply) -> Step:
            step = await super().step(reply)
            return step._replace(reward=0.5, terminated=True) if reply.tool_calls else step

    async def go_on(task: AgentTask, client: Client) -> None:
        messages = [*task.messages, await client.chat(task.messages)]
        assert await client.call("add", {"a": 1, "b": 1}) == "2"
        late = await client.post("/chat/completions", {"messages": messages})
        assert (late.status_code, late.json()["error"]["code"]) == (410, "episode_over")

    done = await play(go_on, [ADD], env=Submits)
    assert (done.stop, done.turns, done.step_rewards) == (Stop.TERMINATED, 1, (0.5,))


async def test_a_step_behind_a_side_call_keeps_its_reward() -> None:
    class Pays(Sums):
        async def step(self, reply: Reply) -> Step:
            return (await super().step(reply))._replace(reward=1.0 if reply.tool_calls else 0.0)

    async def fill_in(task: AgentTask, client: Client) -> None:
        messages: list[Any] = [*task.messages, await client.chat(task.messages)]
        await client.chat([{"role": "user", "content": "Give this a title"}], tools=None)
        content = await client.call("add", {"a": 1, "b": 1})  # not as the model wrote it
        (one,) = messages[-1]["tool_calls"]
        await client.chat([*messages, {"role": "tool", "tool_call_id": one["id"], "content": content}])

    said = {".1": "a title"}
    done = await play(fill_in, lambda s, turn: said.get(s[-2:]) or [call("add", a=1), "right"][turn], env=Pays)
    assert (done.turns, done.metrics["agent/side_calls"], sum(done.step_rewards)) == (2, 1, 1.0)
    assert done.step_rewards[done.calls[0].turn] == 1.0


async def test_an_environment_without_tools_answers_the_last_turn() -> None:
    class Quiz(Env):
        async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
            return "2 + 2?", {}

        async def step(self, reply: Reply) -> Step:
            return Step("", float(reply.text == "4"), True, False, {})

    done = await play(solve, ["4"], env=Quiz)
    assert (done.reward, done.step_rewards) == (1.0, (1.0,))


async def test_an_episode_that_takes_too_long_ends_with_its_agent() -> None:
    async def sleep(task: AgentTask, client: Client) -> None:
        await client.chat(task.messages)
        await anyio.sleep(60)

    done = await play(sleep, ["right"], episode_timeout_s=0.5)
    assert done.stop is Stop.TIMEOUT
    assert done.fault is not None
    assert "over 0.5 s" in done.fault.message


async def test_the_agents_own_time_is_told() -> None:
    async def think(task: AgentTask, client: Client) -> None:
        messages: list[Any] = list(task.messages)
        for _ in range(3):
            await anyio.sleep(0.1)
            messages += [await client.chat(messages), {"role": "user", "content": "and?"}]

    async with rolling_out(think, ScriptedEngine(["so"], latency_s=0.02)) as rollout:
        done = await rollout.episode(1)
        lanes = rollout.lanes.cut()
        assert rollout.concurrency._other_s > 0.05 > rollout.concurrency._engine_s > 0
    assert 0.3 <= done.timings["agent"] < done.timings["total"] - 3 * 0.02
    assert lanes.seconds["agent"] == pytest.approx(done.timings["agent"])
    assert not any(lane.inside for lane in rollout.lanes._lanes.values())


async def test_a_request_that_comes_when_the_agent_has_ended_changes_nothing() -> None:
    late: list[int] = []

    class Slow(Sums):
        async def score(self, trajectory: Trajectory) -> dict[str, float]:
            with anyio.fail_after(60):
                while not late:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            return await super().score(trajectory)

    async with anyio.create_task_group() as tasks:

        async def ask_late(task: AgentTask, client: Client) -> None:
            await anyio.sleep(0.05)
            late.append((await client.post("/chat/completions", {"messages": list(task.messages)})).status_code)

        async def ask(task: AgentTask, client: Client) -> None:
            await client.chat(task.messages)
            tasks.start_soon(ask_late, task, client)

        async with rolling_out(ask, ScriptedEngine(["right"]), env=Slow) as rollout:
            done = await rollout.episode(1)
            lanes = rollout.lanes.cut()
    assert (late, done.turns, done.reward) == ([410], 1, 1.0)
    assert lanes.seconds["reward"] >= 0.04
    assert not any(lane.inside for lane in rollout.lanes._lanes.values())


class Capital(ToolEnv):
    """Gives a task, and scores the answer; its tools are the agent's own."""

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        return "What is the capital of France?", {}

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"right": float("Paris" in trajectory.answer)}


async def test_an_environment_that_has_no_tools_leaves_the_agent_its_own() -> None:
    async def look_up(task: AgentTask, client: Client) -> None:
        assert list(task.tools) == []
        own = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
        messages: list[Any] = list(task.messages)
        messages.append(await client.chat(messages, tools=own))
        (one,) = messages[-1]["tool_calls"]
        messages.append({"role": "tool", "tool_call_id": one["id"], "content": "2"})
        await client.chat(messages, tools=own)

    done = await play(look_up, [ADD, "It is Paris."], env=Capital)
    assert (done.reward, done.turns, done.stop) == (1.0, 2, Stop.TERMINATED)
    assert done.calls == ()
    assert len(done.contexts) == 1
