"""Where the threads of an agent's episode come from: what an agent does is recognised from its requests alone."""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest

from agentrl import EnvSpec, Trajectory
from agentrl.agents.agent import AgentTask
from agentrl.rollout.rollout import Rollout
from agentrl.rollout.threads import open_thread
from agentrl.rollout.threads.forest import ThreadForest
from agentrl.rollout.threads.open_thread import OpenThread
from agentrl.rollout.token_context import TokenContext
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Segment
from tests.helpers.agents import Client, Sums, play, rolling_out, solve
from tests.rollout.test_contexts import Speaker
from tests.rollout.test_contexts import renderer as qwen3

pytestmark = pytest.mark.anyio
ADD = call("add", a=1, b=1)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def shape(trajectory: Trajectory) -> list[tuple[Any, ...]]:
    """List each thread's role, parent, the parent's turn before it, its turns, and what was said in it alone."""
    return [
        (t.role.value, t.parent, t.after, t.turns, [m["content"] for m in t.messages[t.shared :]])
        for t in trajectory.threads
    ]


async def test_one_conversation_is_no_tree() -> None:
    assert (await play(solve, [ADD, "right"])).threads == ()


async def test_a_call_that_a_sub_agent_answers_is_its_parent() -> None:
    async def boss(task: AgentTask, client: Client) -> None:
        messages: list[Any] = list(task.messages)
        messages.append(await client.chat(messages))
        (one,) = messages[-1]["tool_calls"]
        helped: list[Any] = [user("You help. count all the apples, please")]
        helped.append(await client.chat(helped))
        helped.append({"role": "tool", "tool_call_id": helped[-1]["tool_calls"][0]["id"], "content": "2"})
        helped.append(await client.chat(helped))
        messages.append({"role": "tool", "tool_call_id": one["id"], "content": helped[-1]["content"]})
        await client.chat(messages)

    script = {"0": [call("help", what="count all the apples"), "right"], "1": [ADD, "two"]}
    done = await play(boss, ScriptedEngine(lambda s, turn: script["1" if s.endswith(".1") else "0"][turn]))
    assert shape(done) == [
        ("main", None, None, (0, 3), ["What is 1 + 1?", "", "two", "right"]),
        ("sub-agent", 0, 0, (1, 2), ["You help. count all the apples, please", "", "2", "two"]),
    ]
    assert done.answer == "right"


async def test_of_two_that_wait_the_one_whose_call_has_the_words_is_the_parent() -> None:
    async def boss(task: AgentTask, client: Client) -> None:
        first: list[Any] = list(task.messages)
        first.append(await client.chat(first))
        helper: list[Any] = [user("the first helper of two")]
        helper.append(await client.chat(helper))
        for words in ("peel every single pear", "ask the first helper of two"):
            await client.chat([user(words)])
        await client.chat([*first, user("go on")])

    says = {"1": call("help", what="peel every single pear"), "2": "a", "3": "b"}
    first = call("help", what="the first helper of two")
    engine = ScriptedEngine(lambda session, turn: says.get(session.rpartition(".")[2], first if not turn else "right"))
    done = await play(boss, engine)
    assert [(t.role.value, t.parent) for t in done.threads] == [
        *(("main", None), ("sub-agent", 0), ("sub-agent", 1), ("sub-agent", 0)),
    ]


async def test_the_answer_is_the_main_agents_where_it_is_asked_for_without_tools() -> None:
    async def boss(task: AgentTask, client: Client) -> None:
        messages: list[Any] = [*task.messages, await client.chat(task.messages)]
        (one,) = messages[-1]["tool_calls"]
        helped = await client.chat([user("find the number for me, please")])
        messages.append({"role": "tool", "tool_call_id": one["id"], "content": helped["content"]})
        await client.chat(messages, None)

    done = await play(boss, ScriptedEngine(lambda s, turn: "its own" if s.endswith(".1") else [ADD, "right"][turn]))
    assert (done.answer, done.reward) == ("right", 1.0)
    assert [(t.role.value, t.turns) for t in done.threads] == [("main", (0, 2)), ("sub-agent", (1,))]


async def test_a_folded_history_goes_on_for_the_one_before_it() -> None:
    async def fold(task: AgentTask, client: Client) -> None:
        messages: list[Any] = list(task.messages)
        for _ in range(2):
            messages.append(await client.chat(messages))
            messages.append(user("and on"))
        folded: list[Any] = [*task.messages, user("what is known: nothing")]
        folded += [await client.chat(folded), user("and on")]
        await client.chat([user("a title"), user("for the screen")], None)
        await client.chat([user("somebody else, who is asked later")])
        await client.chat(folded)

    done = await play(fold, ["one", "two"])
    assert [t[:4] for t in shape(done)] == [
        ("main", None, None, (0, 1)),
        ("compaction", 0, 1, (2, 5)),
        ("side call", 1, 2, (3,)),
        ("sub-agent", 1, 2, (4,)),
    ]
    assert [t.trained for t in done.threads] == [True, True, False, True]
    assert shape(done)[1][4] == ["what is known: nothing", "one", "and on", "two"]


async def test_a_history_that_is_sent_in_other_words_is_a_rewrite() -> None:
    async def reword(task: AgentTask, client: Client) -> None:
        messages: list[Any] = list(task.messages)
        for number in range(3):
            said = await client.chat(messages)
            messages += [{"role": "assistant", "content": f"Step {number}: {said['content']}"}, user("go on")]

    done = await play(reword, ["one"])
    assert [t[:4] for t in shape(done)] == [
        ("main", None, None, (0,)),
        ("rewrite", 0, 0, (1,)),
        ("rewrite", 1, 1, (2,)),
    ]
    assert shape(done)[2][4] == ["Step 1: one", "go on", "one"]


async def test_forks_of_a_turn_and_of_a_prompt() -> None:
    async def fork(task: AgentTask, client: Client) -> None:
        messages = list(task.messages)
        first = await client.chat(messages)
        for way in ("left", "right"):
            await client.chat([*messages, first, user(way)])
        await client.post("/chat/completions", {"messages": messages, "tools": task.tools, "n": 2})

    done = await play(fork, ScriptedEngine(lambda session, turn: f"{session[-1]}{turn}"))
    assert [t[:3] for t in shape(done)] == [
        *(("main", None, None), ("fork", 0, 0), ("fork", 0, None), ("fork", 0, None)),
    ]
    assert shape(done)[1][4][0] == "right"
    assert len(done.threads) == len(done.contexts)


async def test_many_conversations_are_not_each_compared_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def count(*threads: OpenThread) -> int:
        compared.append(1)
        return count_shared(*threads)

    count_shared = open_thread._count_shared
    monkeypatch.setattr(open_thread, "_count_shared", count)
    context = Rollout(EnvSpec(Sums), ScriptedEngine(["x"]), ByteRenderer())
    forest = ThreadForest(context, ByteRenderer(), 0, "s", goes_on_when_cut=True)
    brief = {"role": "system", "content": "be brief"}
    for number in range(200):
        await forest.complete([brief, user(f"question {number % 150}")], [])
    played = forest.collect()
    assert len(compared) <= 5 * len(played.threads)
    roles = [t.role.value for t in played.threads]
    assert roles == ["main"] + ["compaction"] * 149 + ["fork"] * 50
    assert [t.parent for t in played.threads[-50:]] == list(range(50))


async def test_a_side_call_before_everything_is_nobodys_parent() -> None:
    async def title_first(task: AgentTask, client: Client) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.chat, [user("a title")], None)
            await anyio.sleep(0.05)
            tasks.start_soon(solve, task, client)

    done = await play(title_first, ["title", "right"])
    assert [t[:4] for t in shape(done)] == [("side call", None, None, (0,)), ("main", None, None, (1,))]


@pytest.mark.parametrize("seed", range(10))
def test_the_tokens_of_a_thread_are_those_of_its_segments_whatever_is_cut_or_forked(seed: int) -> None:
    dice = random.Random(seed)
    threads = [OpenThread(0, (), opened=True)]
    seen: list[tuple[TokenContext, list[int]]] = []  # what engines were given meanwhile
    for _ in range(80):
        thread = dice.choice(threads)
        what = dice.choice(["append", "append", "cut", "fork"])
        if what == "append":
            thread.append(Segment("env", tuple(dice.randrange(900) for _ in range(dice.randrange(5)))))
        elif what == "cut":
            thread.cut(0, dice.randrange(len(thread.segments) + 1))
        else:
            kept = thread.segments[: dice.randrange(len(thread.segments) + 1)]
            end = sum(len(s.token_ids) for s in kept)
            threads.append(
                OpenThread(len(threads), (), opened=False, segments=kept, token_ids=thread.token_ids.take(end))
            )
        seen.append((thread.token_ids.copy(), list(thread.token_ids)))
        for one in threads:
            assert one.token_ids == [i for s in one.segments for i in s.token_ids]
    assert all(list(given) == then for given, then in seen)


async def test_a_conversation_that_is_gone_on_with_in_another_thread_is_no_side_call() -> None:
    """A template that drops thoughts begins each turn of a helper without tools anew: all its turns are trained."""

    async def boss(task: AgentTask, client: Client) -> None:
        helper: list[Any] = [user("help, and speak twice")]
        for _ in range(2):
            helper += [await client.chat(helper, None), user("and?")]
        await client.chat(task.messages)
        await client.chat([user("a title")], None)

    said = ["<think>\nhm\n</think>\n\none", "<think>\nhm\n</think>\n\ntwo"]
    async with rolling_out(boss, Speaker(said), renderer=qwen3("as_template")) as rollout:
        done = await rollout.episode(1)
    assert sorted(t.role.value for t in done.threads) == ["main", "rewrite", "side call", "sub-agent"]
    assert (done.turns, done.metrics["agent/side_calls"]) == (3, 1)
