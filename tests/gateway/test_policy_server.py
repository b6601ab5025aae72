"""A policy that is served: what goes on with which conversation, whose sampling stands, what is recorded of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx2
import pytest

from agentrl import Env, EnvSpec, Trajectory, UserError
from agentrl.gateway.policy_server import PolicyServer
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Completion, SamplingParams, Stop

pytestmark = pytest.mark.anyio
ADD = call("add", a=1, b=1)
HELLO = {"role": "user", "content": "hello"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


class NextEngine(ScriptedEngine):
    """Says its texts one after the other, whoever asks, and keeps what was asked."""

    def __init__(self, texts: Sequence[str], **more: Any) -> None:
        super().__init__(lambda *_: next(self.texts), **more)
        self.texts = iter(texts)
        self.params: list[SamplingParams] = []

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        self.params.append(params)
        return await super().generate(token_ids, params, session=session)


@dataclass
class Served:
    """A server in this process, a client of it, and what it recorded."""

    server: PolicyServer
    http: httpx2.AsyncClient
    engine: NextEngine
    says: list[str] = field(default_factory=list)
    recorded: list[Trajectory] = field(default_factory=list)

    async def post(self, path: str, body: Any, key: str = "secret", **headers: str) -> httpx2.Response:
        return await self.http.post(path, json=body, headers={"authorization": f"Bearer {key}", **headers})

    async def chat(self, *messages: Any, key: str = "secret", **more: Any) -> dict[str, Any]:
        response = await self.post("/v1/chat/completions", {"messages": messages, **more}, key)
        assert response.status_code == 200, response.text
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message

    async def end(self) -> list[Trajectory]:
        await self.server.end_idle(0.0)
        return self.recorded


@asynccontextmanager
async def serving(texts: Sequence[str], token: str = "secret", **engine_is: Any) -> AsyncIterator[Served]:
    engine = NextEngine(texts, **engine_is)
    context = Rollout(EnvSpec(Env), engine, ByteRenderer())

    async def record(conversations: Sequence[Trajectory]) -> None:
        served.recorded.extend(conversations)

    says: list[str] = []
    server = PolicyServer(context, record, token, model="nano", say=says.append)
    transport = httpx2.ASGITransport(app=server.build_app())
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        served = Served(server, http, engine, says)
        yield served


async def test_a_conversation_that_is_gone_on_with_is_one_episode_in_the_tokens_that_were_sampled() -> None:
    async with serving(["let me see " + ADD, "two"]) as served:
        first = await served.chat(HELLO, tools=TOOLS)
        answer = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "2"}
        last = await served.chat(HELLO, first, answer, tools=TOOLS)
        (one,) = await served.end()
    assert last["content"] == "two"
    assert (one.turns, one.stop, one.reward, len(one.contexts)) == (2, Stop.TERMINATED, None, 1)
    sampled = [s for s in one.segments if s.author == "model"]
    renderer = ByteRenderer()
    assert [renderer.decode(s.token_ids) for s in sampled][1].startswith("two")
    assert all(len(s.token_ids) == len(s.logprobs or ()) for s in sampled)
    assert [m["role"] for m in one.messages] == ["user", "assistant", "tool", "assistant"]


async def test_other_conversations_are_episodes_of_their_own() -> None:
    async with serving(["one", "two", "three"]) as served:
        await served.chat(HELLO)
        await served.chat(HELLO)
        await served.chat({"role": "user", "content": "another"})
        recorded = await served.end()
    assert [t.task for t in recorded] == [0, 1, 2]
    assert [t.turns for t in recorded] == [1, 1, 1]


async def test_requests_of_one_name_are_one_episode() -> None:
    async with serving(["one", "two", "three"]) as served:
        await served.chat(HELLO, key="secret.mine")
        await served.chat({"role": "user", "content": "another"}, key="secret.mine")
        body = {"messages": [HELLO]}
        await served.post("/v1/chat/completions", body, **{"x-session-id": "mine"})
        (one,) = await served.end()
    assert (one.turns, len(one.threads), one.info["name"]) == (3, 3, "mine")


async def test_a_first_turn_that_is_asked_for_again_is_sampled_once() -> None:
    body, again = {"messages": [HELLO]}, {"x-stainless-retry-count": "1"}
    async with serving(["one", "two", "three"]) as served:
        first = await served.post("/v1/chat/completions", body)
        same = await served.post("/v1/chat/completions", body, **again)
        assert same.json()["choices"] == first.json()["choices"]
        await served.chat(HELLO)
        third = await served.post("/v1/chat/completions", body, **again)  # of either: nobody gets another one's turn
        assert third.json()["choices"][0]["message"]["content"] == "three"
        assert [t.answer for t in await served.end()] == ["one", "two", "three"]


@pytest.mark.parametrize(("name", "encoding"), [("Zürich 東京", "utf-8"), ("Zürich", "latin-1")])
async def test_a_session_is_called_as_its_client_calls_it(name: str, encoding: str) -> None:
    async with serving(["one"]) as served:
        headers = {b"authorization": b"Bearer secret", b"x-session-id": name.encode(encoding)}
        await served.http.post("/v1/chat/completions", json={"messages": [HELLO]}, headers=headers)
        (one,) = await served.end()
    assert one.info["name"] == name


async def test_concurrent_requests_that_are_the_same_are_each_sampled() -> None:
    async with serving(["one", "two"]) as served, anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(served.chat, HELLO)
    assert sorted(t.answer for t in await served.end()) == ["one", "two"]


async def test_several_turns_of_a_request_are_one_episode_with_forks() -> None:
    async with serving(["one", "two", "three"]) as served:
        response = await served.post("/v1/chat/completions", {"messages": [HELLO], "n": 2})
        choices = [c["message"] for c in response.json()["choices"]]
        await served.chat(HELLO, choices[1], HELLO)
        (one,) = await served.end()
    assert len(choices) == 2
    assert one.turns == 3


async def test_the_clients_sampling_stands_and_the_same_seed_draws_the_same() -> None:
    async with serving(["a", "b", "c", "d"]) as served:
        await served.chat(HELLO, temperature=0.25, top_p=0.5, top_k=7, max_tokens=9, stop=["x"], seed=3)
        await served.chat(HELLO, seed=3)
        await served.chat(HELLO)
        await served.chat(HELLO)
        recorded = await served.end()
    first, second, third, fourth = served.engine.params
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0.25, 0.5, 7, 9)
    assert first.stop is not None
    assert first.stop.strings == ("x",)
    assert first.seed == second.seed
    assert len({second.seed, third.seed, fourth.seed}) == 3
    assert (second.temperature, second.max_tokens) == (1.0, 512)
    assert recorded[0].temperature == 0.25


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"temperature": -1}, "temperature: -1 is no number from 0 to 100"),
        ({"temperature": True}, "temperature: True is no number from 0 to 100"),
        ({"max_tokens": 0}, "max_tokens: 0 is no whole number from 1 on"),
        ({"stop": [3]}, "stop: [3] is neither a text nor a list of texts"),
        ({"presence_penalty": 0.5}, "presence_penalty: 0.5 is not sampled by here; leave it out"),
        (
            {"response_format": {"type": "json_object"}},
            "response_format: {'type': 'json_object'} is not sampled by here; leave it out",
        ),
    ],
)
async def test_a_setting_that_is_none_is_refused_in_a_sentence(setting: dict[str, Any], sentence: str) -> None:
    async with serving(["one"]) as served:
        response = await served.post("/v1/chat/completions", {"messages": [HELLO], **setting})
        assert await served.end() == []
    assert (response.status_code, response.json()["error"]["message"]) == (400, sentence)


async def test_what_changes_nothing_is_taken_and_what_nothing_follows_is_said_once() -> None:
    async with serving(["one"] * 5) as served:
        for _ in range(2):
            await served.chat(HELLO, presence_penalty=0, response_format={"type": "text"}, reasoning_effort="low")
        await served.chat(HELLO, top_logprobs=0, logit_bias={}, tool_choice="auto", parallel_tool_calls=True)
        unfollowed: dict[str, Any] = {
            "top_logprobs": 5,
            "logit_bias": {"7": 1},
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        await served.chat(HELLO, **unfollowed)
        await served.post("/v1/messages", {"messages": [HELLO], "max_tokens": 9, "tool_choice": {"type": "any"}})
    assert served.says == [
        "a client asks for reasoning_effort: nothing here follows that",
        "a client asks for top_logprobs, logit_bias, tool_choice, parallel_tool_calls: nothing here follows that",
    ]


@pytest.mark.parametrize("key", ["", "other", "secretmine", "secre"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_who_has_no_token_gets_nothing(key: str, path: str) -> None:
    async with serving(["one"]) as served:
        response = await served.post(path, {"messages": [HELLO]}, key)
        models = await served.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert await served.end() == []
    assert (response.status_code, models.status_code) == (401, 401)
    assert "wants its token" in response.json()["error"]["message"]


async def test_without_a_token_a_key_names_the_episode() -> None:
    async with serving(["one", "two"], token="") as served:
        await served.chat(HELLO, key="any")
        await served.chat(HELLO, key="any")
        (one,) = await served.end()
    assert one.info["name"] == "any"


async def test_a_turn_that_was_cut_ends_nothing() -> None:
    async with serving(["a long answer", "two"]) as served:
        cut = await served.post("/v1/chat/completions", {"messages": [HELLO], "max_tokens": 3})
        message = cut.json()["choices"][0]["message"]
        await served.chat(HELLO, message, HELLO)
        (one,) = await served.end()
    assert cut.json()["choices"][0]["finish_reason"] == "length"
    assert (one.turns, one.stop, len(one.contexts)) == (2, Stop.TERMINATED, 2)


async def test_a_conversation_that_ends_by_a_turn_that_was_cut_says_so() -> None:
    async with serving(["a long answer"]) as served:
        await served.chat(HELLO, max_tokens=3)
        (one,) = await served.end()
    assert (one.turns, one.stop) == (1, Stop.MAX_TOKENS)


async def test_what_is_too_long_is_an_error_that_clients_know() -> None:
    async with serving(["one"], max_context=64) as served:
        response = await served.post("/v1/chat/completions", {"messages": [{**HELLO, "content": "long " * 60}]})
        assert await served.end() == []
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_idle_conversations_are_recorded_and_the_others_go_on() -> None:
    async with serving(["one", "two", "three"]) as served:
        first = await served.chat(HELLO)
        served.server.idle_s = 1000.0
        await served.server.end_idle()
        assert served.recorded == []
        await served.chat(HELLO, first, HELLO)
        await served.server.end_idle(0.0)
        assert [t.turns for t in served.recorded] == [2]
        await served.chat(HELLO, first, HELLO)  # it has ended: another one begins, from the text
        assert [t.turns for t in await served.end()] == [2, 1]
    assert not served.server._open
    assert not served.server._ends


async def test_responses_go_on_by_the_id_of_the_answer_before() -> None:
    async with serving(["one", "two"]) as served:
        first = (await served.post("/v1/responses", {"input": "hello"})).json()
        body = {"input": "again", "previous_response_id": first["id"]}
        second = (await served.post("/v1/responses", body)).json()
        (one,) = await served.end()
    texts = [answer["output"][0]["content"][0]["text"] for answer in (first, second)]
    assert (texts, one.turns, len(one.contexts)) == (["one", "two"], 2, 1)


async def test_a_stream_is_the_turn_in_pieces_and_a_key_may_be_anthropics() -> None:
    async with serving(["one"]) as served:
        body = {"messages": [HELLO], "max_tokens": 9, "stream": True}
        response = await served.http.post("/v1/messages", json=body, headers={"x-api-key": "secret"})
        (one,) = await served.end()
    assert one.turns == 1
    assert response.headers["content-type"].startswith("text/event-stream")
    assert '"text": "one"' in response.text


async def test_what_cannot_be_written_is_kept_and_the_server_goes_on() -> None:
    async with serving(["one", "two", "three"]) as served:
        write, disk_is_full = served.server.record, True

        async def record(conversations: Sequence[Trajectory]) -> None:
            if disk_is_full:
                raise UserError("cannot write served: No space left on device")
            await write(conversations)

        served.server.record = record
        for _ in range(2):
            await served.chat(HELLO)
            await served.end()
        assert served.says == [
            "cannot write served: No space left on device\n1 conversations are kept in memory until they can be written"
        ]
        with pytest.raises(UserError, match="No space left on device\n2 conversations are lost"):
            await served.server.end_all()
        disk_is_full = False
        await served.chat(HELLO)
        assert [t.answer for t in await served.end()] == ["one", "two", "three"]
    assert served.server.recorded == 3


async def test_who_is_being_answered_when_the_server_ends_is_told_and_what_was_said_before_is_recorded() -> None:
    answers: list[httpx2.Response] = []
    async with serving(["one", "two"]) as served:
        first = await served.chat(HELLO)
        served.engine.latency_s = 600.0
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                answers.append(await served.post("/v1/chat/completions", {"messages": [HELLO, first, HELLO]}))

            tasks.start_soon(ask)
            while len(served.engine.params) < 2:  # noqa: ASYNC110
                await anyio.sleep(0.001)
            await served.server.end_all()
        (one,) = served.recorded
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "server_ends")
    assert [s.author for s in one.segments] == ["prompt", "model"]


async def test_where_one_of_several_turns_is_refused_the_others_are_not_sampled_on() -> None:
    async with serving(["one", "two"]) as served:
        served.engine.latency_s = 600.0
        generate, ended = served.engine.generate, list[str]()

        async def fail_second(*given: Any, **named: Any) -> Completion:
            try:
                if len(served.engine.params) == 1:
                    raise FloatingPointError("no numbers")
                return await generate(*given, **named)
            finally:
                ended.append("ended")

        served.engine.generate = fail_second  # type: ignore[method-assign]
        with anyio.fail_after(60):
            answer = await served.post("/v1/chat/completions", {"messages": [HELLO], "n": 2})
            await anyio.sleep(0.01)
    assert (answer.status_code, ended) == (500, ["ended"] * 2)


async def test_an_engine_that_fails_is_said_to_whom_it_belongs_and_a_client_may_try_again() -> None:
    async with serving(["one"]) as served:
        generate = served.engine.generate

        async def fail(*_: Any, **__: Any) -> Completion:
            raise RuntimeError("on the GPU\nCUDA error: device-side assert")

        served.engine.generate = fail  # type: ignore[method-assign]
        for _ in range(2):
            answer = await served.post("/v1/chat/completions", {"messages": [HELLO]})
            assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the engine failed")
        served.engine.generate = generate  # type: ignore[method-assign]
        assert (await served.chat(HELLO))["content"] == "one"
    why = "RuntimeError: CUDA error: device-side assert"
    assert served.says == [f"the engine failed, and clients are told so: {why}"]
