"""A player's own way to vLLM's servers: lean HTTP, keys, servers that are lost, and the context as it grows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from agentrl.engines.vllm import turn_servers
from agentrl.engines.vllm.lean_http import HttpLost, LeanHttp
from agentrl.engines.vllm.turn_servers import TurnServers
from agentrl.errors import ProcessLostError, UserError
from agentrl.players.open_players import describe_engine
from agentrl.rollout.token_context import TokenContext
from agentrl.types import SamplingParams

pytestmark = pytest.mark.anyio
PARAMS = SamplingParams(max_tokens=2, seed=7)


@dataclass
class FakeServer:
    """Samples the length of the context, and the seed, each in a byte."""

    version: str = "3"
    status: int = 200
    chunked: bool = False
    drops: int = 0  # requests that are read and not answered
    hangs: bool = False  # requests are read, and nothing comes back
    key: str = "server-key"
    url: str = ""
    asked: int = 0
    connections: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length: ")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.asked += 1
                if self.hangs:
                    await reader.read()  # until the other side gives up
                    break
                if self.drops:
                    self.drops -= 1
                    break
                status = self.status if f"bearer {self.key}" in head else 401
                writer.write(self.answer(status, body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    def answer(self, status: int, body: dict[str, Any]) -> bytes:
        ids = [len(body["token_ids"]) % 256, body["sampling_params"]["seed"] % 256]
        choice = {
            "token_ids": ids,
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
            "weight_versions": [{"version": self.version, "start": 0, "end": 2}],
        }
        content = json.dumps({"choices": [choice], "usage": {"prompt_tokens_details": None}}).encode()
        if not self.chunked:
            return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(content), content)
        parts = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (content[:5], content[5:]))
        return b"HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % (status, parts)


@asynccontextmanager
async def open_servers(*servers: FakeServer) -> AsyncIterator[TurnServers]:
    listening = [await asyncio.start_server(s.talk, "127.0.0.1", 0, limit=1 << 22) for s in servers]
    for server, listener in zip(servers, listening, strict=True):
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    described = {
        "urls": [s.url for s in servers],
        "keys": ["server-key"] * len(servers),
        **{"capacity": 8, "max_context": 1 << 20, "vocabulary": 256, "adapter": ""},
    }
    try:
        async with TurnServers(described) as engine:
            yield engine
    finally:
        for listener in listening:
            listener.close()
        for server in servers:
            for writer in server.writers:
                writer.close()
        await asyncio.sleep(0)


@pytest.mark.parametrize("chunked", [False, True])
async def test_turns_come_back_over_connections_that_stay_open(chunked: bool) -> None:
    server, context = FakeServer(chunked=chunked), TokenContext([1, 2])
    async with open_servers(server) as engine:
        for _ in range(5):
            done = await engine.generate(context.copy(), PARAMS, session="a")
            assert done.token_ids == (len(context), 7)
            assert (done.logprobs, done.versions) == ((-0.5, -0.25), (3, 3))
            context.extend(done.token_ids)
    assert (server.asked, server.connections) == (5, 1)


async def test_a_connection_that_was_closed_meanwhile_is_opened_again() -> None:
    server = FakeServer()
    async with open_servers(server) as engine:
        await engine.generate([1], PARAMS, session="a")
        server.writers[0].close()
        await server.writers[0].wait_closed()
        assert (await engine.generate([1, 2], PARAMS, session="a")).token_ids == (2, 7)
    assert server.connections == 2


@pytest.mark.parametrize("kind", ["drops", "answers 500", "was started anew"])
async def test_a_server_that_fails_is_avoided_and_another_samples_its_turns(kind: str) -> None:
    broken, fine = FakeServer(drops=99 * (kind == "drops")), FakeServer()
    broken.status = 500 if kind == "answers 500" else 200
    broken.version = "default" if kind == "was started anew" else "3"
    async with open_servers(broken, fine) as engine:
        found = [await engine.generate([n, 1], PARAMS, session=f"s{n}") for n in range(6)]
    assert all(done.token_ids == (2, 7) for done in found)
    assert broken.asked >= 1
    assert fine.asked == 6


async def test_sessions_stay_with_their_server_and_are_divided() -> None:
    servers = FakeServer(), FakeServer()
    async with open_servers(*servers) as engine:
        for _ in range(3):
            for session in "abcd":
                await engine.generate([1], PARAMS, session=session)
        assert [len(s.sessions) for s in engine._servers] == [2, 2]
        for session in "abcd":
            engine.end_session(session)
        assert [len(s.sessions) for s in engine._servers] == [0, 0]
    assert [s.asked for s in servers] == [6, 6]


async def wait_for(condition: Callable[[], object]) -> None:
    with anyio.fail_after(60):
        while not condition():  # noqa: ASYNC110  of a condition that has no event
            await asyncio.sleep(0.01)


async def test_turns_in_a_server_that_the_run_has_lost_go_to_another_and_it_is_asked_again_once_it_is_back() -> None:
    hung, fine = FakeServer(hangs=True), FakeServer()
    async with open_servers(hung, fine) as engine:
        engine.set_up([True, True])
        turns = [asyncio.create_task(engine.generate([n, 1], PARAMS, session=f"s{n}")) for n in range(4)]
        await wait_for(lambda: hung.asked == 2)
        engine.set_up([False, True])
        with anyio.fail_after(60):
            assert [done.token_ids for done in await asyncio.gather(*turns)] == [(2, 7)] * 4
            await engine.generate([1], PARAMS, session="new")
        assert (hung.asked, fine.asked, engine.count_requests()) == (2, 5, [0, 0])
        hung.hangs = False
        engine.set_up([True, True])
        await engine.generate([1], PARAMS, session="newer")
        assert hung.asked == 3


async def test_turns_wait_for_a_server_while_the_run_has_lost_all(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    async with open_servers(server) as engine:
        engine.set_up([False])
        turn = asyncio.create_task(engine.generate([1], PARAMS, session="a"))
        await asyncio.sleep(0)
        engine.set_up([True])
        with anyio.fail_after(60):
            assert (await turn).token_ids == (1, 7)
        engine.set_up([False])
        monkeypatch.setattr(turn_servers, "PATIENCE_S", 0.0)
        with pytest.raises(ProcessLostError, match="no server has sampled a turn for 0 s: the run has lost all"):
            await engine.generate([1], PARAMS, session="a")


async def test_a_long_turn_in_a_server_that_breaks_off_is_sampled_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, fine = FakeServer(drops=1), FakeServer()
    async with open_servers(broken, fine) as engine:
        times = iter([0.0, 1000.0])  # as it is chosen, as it breaks off
        monkeypatch.setattr(engine, "_clock", lambda: next(times, 1000.0))
        assert (await engine.generate([1], PARAMS, session="a")).token_ids == (1, 7)
    assert (broken.asked, fine.asked) == (1, 1)


async def test_a_wrong_key_and_a_refused_request_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_servers, "PATIENCE_S", -1.0)
    async with open_servers(FakeServer(key="another")) as engine:
        with pytest.raises(UserError, match=r"no server has sampled a turn for -1 s: .* refuses the key"):
            await engine.generate([1], PARAMS, session="a")
    async with open_servers(FakeServer(status=400)) as engine:
        with pytest.raises(UserError, match="refuses /inference/v1/generate"):
            await engine.generate([1], PARAMS, session="a")


async def test_nobody_there_is_told_as_such() -> None:
    with pytest.raises(HttpLost, match="Error"):
        await LeanHttp("http://127.0.0.1:9", "/x").post(b"{}")


@pytest.mark.parametrize(
    ("url", "elsewhere", "kind"), [("127.0.0.1", True, "forwarded"), ("10.0.0.1", True, "servers")]
)
def test_players_elsewhere_reach_servers_on_loopback_through_the_run(url: str, elsewhere: bool, kind: str) -> None:
    class Engine:
        capacity, max_context = 4, 64

        def describe_servers(self) -> dict[str, Any]:
            return {"urls": [f"http://{url}:8000"], "keys": [""], "vocabulary": 9, "adapter": ""}

        def list_up(self) -> list[bool]:
            return [True]

    assert describe_engine(Engine(), elsewhere=elsewhere)["kind"] == kind  # type: ignore[arg-type]
    assert describe_engine(Engine())["kind"] == "servers"  # type: ignore[arg-type]
