"""Any number of vLLM servers as one engine.

The turns of an episode go to one server, whose cache has the turns before; a new episode goes to the one that has the
fewest. What a server owes when it is lost is asked of another: a turn is a function of its tokens and its seed. A lost
one that answers again is given the current weights, and then takes part again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, Self

import anyio

from agentrl.engine import Meter
from agentrl.engines import adapter, requests, transfer
from agentrl.engines.probe import PROBE, Mismatch, compare, probe_ids
from agentrl.engines.replica import HOW, Lost, Replica
from agentrl.errors import UserError
from agentrl.learner.logprobs import causal_lm
from agentrl.types import Completion, SamplingParams

CHECK_S = 2.0  # between two looks at every server
ATTEMPTS = 6


class ServerEngine:
    """Samples with vLLM servers. An async context manager: entering it connects, and gives all of them the weights.

    Args:
        urls: the servers' addresses, as ``agentrl serve`` prints them.
        model: the policy.
        capacity: requests made of each server at the same time.
        max_context: positions a row may have; the least of the servers' own by default.
        update: what an update does to requests that are running: "in-flight" or "drain".
        start_s: how long to wait for servers that are still starting.
        patience_s: how long to wait for one to come back when all are lost.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: Any,
        *,
        capacity: int = 128,
        max_context: int | None = None,
        update: Literal["in-flight", "drain"] = "in-flight",
        start_s: float = 120.0,
        patience_s: float = 120.0,
    ) -> None:
        self._model = causal_lm(model)
        self._urls, self._each, self._update = tuple(urls), capacity, update
        self._start_s, self._patience_s = start_s, patience_s
        self.capacity = capacity * len(self._urls)
        self.max_context = max_context or 1 << 30
        self.version, self.meter = 0, Meter()
        self.mismatch: Mismatch | None = None
        self.replicas: list[Replica] = []
        self._vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        self._weights = adapter.weights_of(model)
        self._turn = anyio.Lock()
        self._changed = anyio.Event()
        self._closed = False
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        backend = "nccl" if self._model.device.type == "cuda" else transfer.MEMORY
        self._kept = backend == transfer.MEMORY  # a copy of the last weights, for who comes back in mid-step
        try:
            self.replicas = [Replica(url, self._weights, capacity=self._each, backend=backend) for url in self._urls]
            await asyncio.gather(*(self._first(r) for r in self.replicas))
            self.max_context = min(self.max_context, *(r.max_context for r in self.replicas))
            ids = probe_ids(self._vocabulary, self.max_context)
            for replica in self.replicas:
                done, _ = await replica.generate(ids, PROBE)
                self.mismatch = compare(self._model, ids, done)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self.close()
            if isinstance(error, Lost):
                raise UserError(f"engine server: {error}; {HOW}") from None
            raise
        self._watch = asyncio.create_task(self._look_after())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Sample one turn. Raises UserError where the tokens do not fit, and when no server is left."""
        requests.check(token_ids, params, self._vocabulary, self.max_context)
        done, reused = await self._asked(list(token_ids), params, session)
        self.meter.sampled += len(done.token_ids)
        self.meter.reused += reused
        self.meter.prefilled += len(token_ids) - reused
        return done

    def end_session(self, session: str) -> None:
        for replica in self.replicas:
            replica.sessions.discard(session)

    async def update_weights(self, policy: Any, version: int) -> None:
        """All servers sample from ``policy`` from now on; those that are lost are given it when they come back."""
        async with self._turn:
            self._weights.replace(policy)
            self.version = version
            await asyncio.gather(*(self._updated(r) for r in self.replicas))
        if not self._up:
            await self._some()

    async def close(self) -> None:
        """Waiting calls raise, and so does every later one. The servers go on."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        for replica in self.replicas:
            replica.lost("is no longer asked: the engine is closed")
            await replica.close()
        self._weights.close()

    async def _asked(self, token_ids: list[int], params: SamplingParams, session: str) -> tuple[Completion, int]:
        """A turn of whoever does not get lost over it."""
        lost: list[str] = []
        while len(lost) < ATTEMPTS:
            replica = await self._home(session)
            try:
                return await replica.generate(token_ids, params)
            except Lost as error:
                lost.append(str(error))
        raise UserError(f"engine server: {ATTEMPTS} servers were lost over one turn: {'; '.join(lost)}")

    @property
    def _up(self) -> list[Replica]:
        return [r for r in self.replicas if r.up]

    async def _home(self, session: str) -> Replica:
        """The server that has the session, or else the one with the fewest."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._watch is not None and self._watch.done():
            self._watch.result()  # a mistake of ours in there is not to be lost
        up = self._up or await self._some()
        home = next((r for r in up if session in r.sessions), None) or min(up, key=lambda r: len(r.sessions))
        home.sessions.add(session)
        return home

    async def _some(self) -> list[Replica]:
        """Servers that are up, as soon as there are any."""
        with anyio.move_on_after(self._patience_s):
            while not self._up:
                await self._changed.wait()
        if not self._up:
            told = "; ".join(f"{r.url} {r.said}" for r in self.replicas)
            raise UserError(f"engine server: no server is left, for {self._patience_s:g} s: {told}. {HOW}")
        return self._up

    async def _first(self, replica: Replica) -> None:
        """Join a server that may still be starting."""
        with anyio.move_on_after(self._start_s):
            while not await replica.answers():  # noqa: ASYNC110  a server has no event to wait for
                await anyio.sleep(0.5)
        await replica.join(self.version, self._update)

    async def _updated(self, replica: Replica) -> None:
        with suppress(Lost):  # it is down then, and gets them when it is back
            if replica.up:
                await replica.update(self.version, self._update)
            elif not self._kept and await replica.answers():
                await self._join(replica)

    async def _join(self, replica: Replica) -> None:
        await replica.join(self.version, self._update)
        self._changed.set()
        self._changed = anyio.Event()

    async def _look_after(self) -> None:
        """Find out who is lost, also where nothing is asked, and who is back."""
        while True:
            await anyio.sleep(CHECK_S)
            await asyncio.gather(*(self._look(r) for r in self.replicas))

    async def _look(self, replica: Replica) -> None:
        answers = await replica.answers()
        self.meter.answers += answers
        if replica.up and not answers and not self._turn.locked():
            replica.lost("gives no sign of life")
        elif not replica.up and answers and self._kept:
            async with self._turn:
                try:
                    await self._join(replica)
                except (Lost, UserError) as error:
                    replica.said = str(error)
