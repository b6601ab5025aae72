"""OpenEnv over its wire, from a real server on a real socket: one that works, and those that do not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from agentrl_envs.openenv import OpenEnv, _to_messages
from agentrl_envs.openenv_wire import socket_url

from agentrl import ContractError, EnvSpec, Trajectory, UserError
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.testing import ByteRenderer, ScriptedEngine, call

websockets = pytest.importorskip("websockets.asyncio.server")

Handler = Callable[[Any], Awaitable[None]]
SCHEMA = {"type": "object", "properties": {"guess": {"type": "integer"}}, "required": ["guess"]}


class Guessing:
    """A server as OpenEnv's: each socket is a session, each has its own number to guess."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.open = 0
        self.left = anyio.Event()

    async def __call__(self, socket: Any) -> None:
        self.open += 1
        try:
            async for text in socket:
                await socket.send(json.dumps(self.answer(socket, **json.loads(text))))
        finally:
            self.open -= 1
            if self.open == 0 and self.seeds:
                self.left.set()

    def answer(self, socket: Any, type: str, data: dict[str, Any]) -> dict[str, Any]:  # noqa: A002
        if type == "reset":
            self.seeds.append(data["seed"])
            socket.number = data["seed"] % 10
            return self.observed({"prompt": "Guess from 0 to 9.", "metadata": {}}, None, False)
        guess = str(data.get("guess", data.get("message")))
        if not guess.isdecimal():
            errors = [{"loc": ["guess"], "msg": "not a number"}]
            return {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "no", "errors": errors}}
        right = int(guess) == socket.number
        return self.observed({"text": "right" if right else "wrong"}, float(right), right)

    def observed(self, observation: Any, reward: float | None, done: bool) -> dict[str, Any]:
        return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    async with websockets.serve(handler, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def play(handler: Handler, *said: str, limits: EpisodeLimits | None = None, **settings: Any) -> Trajectory:
    async with serving(handler) as url, EnvSpec(OpenEnv, url=url, **settings).open() as spec:
        return await Rollout(spec, ScriptedEngine(said), ByteRenderer(), limits or EpisodeLimits()).episode(3)


async def test_an_episode_over_the_wire() -> None:
    server = Guessing()
    t = await play(server, "1", "<think>hm</think> 6", system_prompt="Play.")
    assert (t.fault, t.reward, t.stop, t.step_rewards) == (None, 1.0, "terminated", (0.0, 1.0))
    said = ["Play.", "Guess from 0 to 9.", "1", "wrong", "<think>hm</think> 6", "right"]
    assert [m["content"] for m in t.messages] == said
    with anyio.fail_after(60):
        await server.left.wait()  # every session is closed


async def test_who_does_nothing_gets_nothing() -> None:
    t = await play(Guessing(), "0", max_turns=3)
    assert (t.fault, t.reward, t.stop) == (None, 0.0, "max_turns")


async def test_episodes_at_once_have_a_session_each_and_splits_have_other_seeds() -> None:
    server = Guessing()
    async with serving(server) as url, EnvSpec(OpenEnv, url=url).open() as spec:
        engine = ScriptedEngine(lambda session, turn: str(turn))
        for split in ("train", "test"):
            rollout = Rollout(spec, engine, ByteRenderer(), split=split)
            groups = await rollout.batch([0, 1, 2, 3], 3)
            assert [t.reward for g in groups for t in g] == [1.0] * 12
        assert sorted(server.seeds) == sorted([0, 2, 4, 6, 1, 3, 5, 7] * 3)


async def test_an_action_by_its_schema_is_a_tool_call() -> None:
    twice = call("act", guess=6) + call("act", guess=6)
    t = await play(Guessing(), "six", call("act", guess="x"), call("do"), twice, action_schema=SCHEMA)
    assert (t.fault, t.reward) == (None, 1.0)
    told = [(m["role"], m["content"]) for m in t.messages[1:] if m["role"] != "assistant"]
    assert told == [
        ("user", "error: act by calling the tool 'act'"),
        ("tool", 'error: [{"loc": ["guess"], "msg": "not a number"}]'),
        ("tool", "error: unknown tool 'do'; the tool is 'act'"),
        ("tool", "right"),
        ("tool", "error: one action a turn"),
    ]


def failing(step: Callable[[Any], Awaitable[None]]) -> Handler:
    """Resets well, and fails in mid-episode."""

    async def handler(socket: Any) -> None:
        async for text in socket:
            if json.loads(text)["type"] == "reset":
                await socket.send(json.dumps(Guessing().observed("begin", None, False)))
            else:
                await step(socket)

    return handler


def saying(text: str) -> Callable[[Any], Awaitable[None]]:
    return lambda socket: socket.send(text)


async def dying(socket: Any) -> None:
    socket.transport.abort()


@pytest.mark.parametrize(
    ("step", "kind", "sentence"),
    [
        (dying, "openenv_gone", "closed the connection at step"),
        (lambda socket: socket.close(), "openenv_gone", "closed the connection at step"),
        (saying("no JSON"), "openenv_garbage", "answered step with 'no JSON'"),
        (saying("[1]"), "openenv_garbage", "answered step"),
        (saying('{"type": "observation", "data": {}}'), "openenv_garbage", "answered step"),
        (saying('{"type": "observation", "data": {"observation": "", "reward": NaN}}'), "openenv_garbage", "NaN"),
        (saying('{"type": "observation", "data": {"observation": "", "reward": "1"}}'), "openenv_garbage", "reward"),
        (
            saying('{"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "boom"}}'),
            "openenv_error",
            "at step: boom",
        ),
    ],
)
async def test_a_server_that_fails_is_a_fault_of_the_world(step: Any, kind: str, sentence: str) -> None:
    t = await play(failing(step), "x")
    assert t.fault is not None
    assert (t.fault.kind, t.reward, t.stop) == (kind, None, "fault")
    assert sentence in t.fault.message


async def test_a_server_that_hangs_is_given_up_at_the_turns_deadline() -> None:
    async def hanging(socket: Any) -> None:
        await socket.wait_closed()

    t = await play(failing(hanging), "x", limits=EpisodeLimits(turn_timeout_s=0.2))
    assert t.fault is not None
    assert t.fault.kind == "turn_timeout"


async def test_no_server_is_a_sentence_before_the_first_episode() -> None:
    async with serving(Guessing()) as url:
        pass
    with pytest.raises(
        UserError, match=r"env 'openenv': no OpenEnv server at ws://127\.0\.0\.1.*start the server first"
    ):
        async with EnvSpec(OpenEnv, url=url).open():
            pass


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:8000", "ws://127.0.0.1:8000/ws"),
        ("https://host/", "wss://host/ws"),
        ("ws://host:1/ws", "ws://host:1/ws"),
        ("wss://host/echo/ws?key=1", "wss://host/echo/ws?key=1"),
    ],
)
def test_addresses(given: str, url: str) -> None:
    assert socket_url(given) == url


@pytest.mark.parametrize("given", ["host:8000", "ftp://host", "", "http://"])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(ContractError, match="needs an address such as http://"):
        socket_url(given)


@pytest.mark.parametrize(
    ("observation", "content"),
    [
        ("text", "text"),
        ({"prompt": "p", "done": False}, "p"),
        ({"observation": {"text": "deep"}}, "deep"),
        ({"text": "", "board": [1, 2]}, '{"text": "", "board": [1, 2]}'),
        ([{"role": "alien", "content": "x"}], '[{"role": "alien", "content": "x"}]'),
        (7, "7"),
    ],
)
def test_observations_are_messages(observation: Any, content: str) -> None:
    assert _to_messages(observation) == [{"role": "user", "content": content}]


def test_messages_stay_as_they_are() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert _to_messages({"messages": messages, "text": "x"}) == messages
