"""Any number of vLLM servers as a player samples from them: turns alone. Weights are the run's to send. No torch here.

The turns of an episode go to one server, whose cache has the turns before; a new episode goes to the server with the
fewest. One that does not answer is left alone for a while, one that the run has lost until that has it back, and its
turns are sampled by another: a turn is a function of its tokens and its seed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Self, TypeVar

import anyio

from agentrl.engines.server_keys import REFUSALS
from agentrl.engines.vllm import requests
from agentrl.engines.vllm.keyed_http import GENERATE, KeyedHttp
from agentrl.engines.vllm.lean_http import GivenUp, HttpLost, await_while_up
from agentrl.errors import ProcessLostError, UserError
from agentrl.rollout.engine_protocol import Meter
from agentrl.types import Completion, SamplingParams

T = TypeVar("T")
AVOIDED_S, PATIENCE_S = 2.0, 120.0  # a server that did not answer is avoided; a turn that none takes ends the run


class _TurnServer:
    """A server, the episodes that are with it, and until when it is avoided."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.http = url, KeyedHttp(url, GENERATE, key)
        self.sessions: set[str] = set()
        self.avoided_until, self.running = 0.0, 0  # turns that it is asked for
        self.up, self._lost = True, asyncio.get_running_loop().create_future()

    def set_up(self, up: bool) -> None:
        """Take it for up, or for lost: what is asked of it is given up then."""
        if up and not self.up:
            self.avoided_until, self._lost = 0.0, asyncio.get_running_loop().create_future()
        elif self.up and not up:
            self.sessions.clear()
            self._lost.set_result(None)
        self.up = up

    async def while_up(self, call: Awaitable[T]) -> T:
        """Await an answer. Raises GivenUp as soon as the server is lost."""
        return await await_while_up(call, self._lost)


class TurnServers:
    """An engine that samples turns with vLLM servers.

    Args:
        described: ``urls``, ``keys``, ``capacity`` of all, ``max_context``, ``vocabulary``, ``adapter``, the name of
            what is trained beside the model, and ``routed_layers``, whose experts are read.
    """

    takes_grammars = True

    def __init__(self, described: Mapping[str, Any]) -> None:
        self.capacity, self.max_context = int(described["capacity"]), int(described["max_context"])
        self.meter, self.version = Meter(), 0
        self._vocabulary, self._adapter = int(described["vocabulary"]), str(described["adapter"])
        self._layers = tuple(map(int, described.get("routed_layers", ())))
        self._servers = [_TurnServer(url, key) for url, key in zip(described["urls"], described["keys"], strict=True)]
        self._clock = asyncio.get_running_loop().time
        self._sampled_at = 0.0  # when a turn was last sampled
        self._back = anyio.Event()  # a server is up again

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Sample a turn.

        Raises:
            UserError: the tokens do not fit, a server refuses them, or none has answered for ``PATIENCE_S``.
        """
        requests.check_request(token_ids, params, self._vocabulary, self.max_context)
        content = requests.write_request(token_ids, params, self._adapter)
        failed_at: float | None = None
        while True:
            server = await self._choose(session)
            try:
                completion, reused = await server.while_up(self._ask(server, content, params, len(token_ids)))
            except GivenUp:  # it has been told that it is lost: another one is chosen
                continue
            except HttpLost as error:
                now = self._clock()
                server.sessions.discard(session)
                server.avoided_until, failed_at = now + AVOIDED_S, failed_at or now
                if now - max(failed_at, self._sampled_at) > PATIENCE_S:
                    lost = f"{server.url} {error}"
                    raise ProcessLostError(f"no server has sampled a turn for {PATIENCE_S:g} s: {lost}") from None
                if all(s.avoided_until > now for s in self._servers if s.up):
                    await asyncio.sleep(AVOIDED_S / 4)
                continue
            self._sampled_at = self._clock()
            self.meter.sampled += len(completion.token_ids)
            self.meter.reused += reused
            self.meter.prefilled += len(token_ids) - reused
            return completion

    async def _ask(
        self, server: _TurnServer, content: bytes, params: SamplingParams, prompt_tokens: int
    ) -> tuple[Completion, int]:
        server.running += 1
        try:
            status, body = await server.http.post(content)
        finally:
            server.running -= 1
        text = body.decode(errors="replace")
        if status in (400, 404, 422):
            raise UserError(f"{server.url} refuses {GENERATE}: {text:.300}")
        if status in REFUSALS:  # it was started anew, perhaps, and the run has its new key before long
            raise HttpLost(f"refuses the key: {text.strip():.300}")
        if status != 200:
            raise HttpLost(f"answered {status}: {text:.200}")
        answer = requests.parse_answer(json.loads(body), params, prompt_tokens, self._layers)
        if answer is None:
            raise HttpLost("was started anew, and has its first weights")
        return answer

    async def _choose(self, session: str) -> _TurnServer:
        """Choose the server that has the session, or else the one with the fewest that is not avoided."""
        up = [s for s in self._servers if s.up] or await self._wait_for_server()
        now = self._clock()
        up = [s for s in up if s.avoided_until <= now] or up
        server = next((s for s in up if session in s.sessions), None) or min(up, key=lambda s: len(s.sessions))
        server.sessions.add(session)
        return server

    async def _wait_for_server(self) -> list[_TurnServer]:
        """Wait until a server is up; return those that are."""
        with anyio.move_on_after(PATIENCE_S):
            while not any(s.up for s in self._servers):
                await self._back.wait()
        if up := [s for s in self._servers if s.up]:
            return up
        raise ProcessLostError(f"no server has sampled a turn for {PATIENCE_S:g} s: the run has lost all of them")

    def set_up(self, flags: Sequence[bool]) -> None:
        """Take the servers for up or for lost, in their order, as the run does: turns of a lost one go to others."""
        for server, up in zip(self._servers, flags, strict=True):
            server.set_up(up)
        if any(flags):
            self._back.set()
            self._back = anyio.Event()

    def count_requests(self) -> list[int]:
        """Count the turns that each server is asked for, in the order of the servers."""
        return [server.running for server in self._servers]

    def end_session(self, session: str) -> None:
        for server in self._servers:
            server.sessions.discard(session)

    async def update_weights(self, policy: Any, version: int) -> None:
        """Leave it to the run, which sends them to the servers."""

    async def close(self) -> None:
        for server in self._servers:
            await server.http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
