"""Any number of vLLM servers as one engine.

The turns of an episode go to one server, whose cache has the turns before; a new episode goes to the server with the
fewest. When a server is lost, its running turns are sampled by another: a turn is a function of its tokens and its
seed. A lost server that answers again is sent the current weights, and then takes part again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio
import torch

from agentrl.engines.vllm import launch, lora_sender, requests, weight_sender
from agentrl.engines.vllm.fleet_weights import FleetWeights
from agentrl.engines.vllm.keyed_http import find_key
from agentrl.engines.vllm.logprob_check import PROBE_PARAMS, LogprobMismatch, check_logprobs, draw_probe_prompt
from agentrl.engines.vllm.m2n_sender import find_m2n_problem
from agentrl.engines.vllm.rendezvous import ANYWHERE, Rendezvous
from agentrl.engines.vllm.server_activity import list_servers
from agentrl.engines.vllm.server_client import START_HINT, Replica, ServerLost
from agentrl.engines.vllm.transfer_backend import (
    BETWEEN_GPUS,
    GROUPS,
    M2N,
    MEMORY,
    TransferBackend,
    choose_backend,
    find_setting_problem,
)
from agentrl.engines.vllm.weight_client import SyncDeadline
from agentrl.errors import ProcessLostError, UserError
from agentrl.models.lm_head import unwrap_model
from agentrl.rollout.engine_protocol import Meter
from agentrl.runtime.activity import ProcessActivity
from agentrl.settings.secret import Secret
from agentrl.types import Completion, SamplingParams

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

CHECK_S = 2.0  # between two checks of every server
ATTEMPTS = 6


class ServerEngine:
    """An engine that samples with vLLM servers. Entering its async context connects, and sends the weights to all.

    Args:
        urls: the servers' addresses, as ``agentrl serve`` prints them.
        model: the policy.
        capacity: requests made of each server at the same time.
        max_context: positions a row may have; the least of the servers' own by default.
        update: what an update does to requests that are running: "in-flight" or "drain".
        start_s: how long to wait for servers that are still starting.
        patience_s: how long to wait for one to come back when all are lost.
        weight_sync_timeout_s: of each stage of a weight transfer, beyond what the bytes take; a server that takes
            longer is lost, and the others get the weights.
        rendezvous: where GPUs meet to send weights.
        weight_transfer: how weights go to the servers; auto: as they were started for.
        return_routed_experts: the servers say which experts the routers chose; they were started for that.
    """

    takes_grammars = True

    def __init__(
        self,
        urls: Sequence[str],
        model: PreTrainedModel | PeftModel,
        *,
        capacity: int = 128,
        max_context: int | None = None,
        update: Literal["in-flight", "drain"] = "in-flight",
        start_s: float = 120.0,
        patience_s: float = 120.0,
        weight_sync_timeout_s: float = 10.0,
        rendezvous: Rendezvous = ANYWHERE,
        weight_transfer: TransferBackend = "auto",
        return_routed_experts: bool = False,
    ) -> None:
        self._model = unwrap_model(model)
        self.returns_routed_experts = return_routed_experts
        self._layers = launch.find_routed_layers(self._model, on_cpu=False) if return_routed_experts else ()
        self._urls, self._capacity_each, self._update = tuple(urls), capacity, update
        self._start_s, self._patience_s, self._sync_s = start_s, patience_s, weight_sync_timeout_s
        self._rendezvous, self._transfer = rendezvous, weight_transfer
        self.on_message: Callable[[str], None] = _ignore
        self.capacity = capacity * len(self._urls)
        self.max_context = max_context or 1 << 30
        self.version, self.meter = 0, Meter()
        self.mismatch: LogprobMismatch | None = None
        self.replicas: list[Replica] = []
        self._vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        self._weights = lora_sender.select_weights(model)
        self._update_lock = anyio.Lock()
        self._reconnected = anyio.Event()
        self._fleet: FleetWeights | None = None  # sends to all servers at once
        self._one_by_one = False
        self._closed = False
        self._watch_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        nbytes = self._weights.count_bytes()
        try:
            deadline = SyncDeadline(self._sync_s, nbytes, MEMORY)
            self.replicas = [self._make_replica(url, MEMORY, deadline) for url in self._urls]
            await asyncio.gather(*(self._await_answer(r) for r in self.replicas))
            backend = await self._choose_backend()
            deadline = SyncDeadline(self._sync_s, nbytes, backend)
            for replica in self.replicas:
                replica.use_backend(backend, deadline)
            if backend in GROUPS and not isinstance(self._weights, lora_sender.AdapterWeights):
                self._fleet = FleetWeights(self._weights, backend, deadline, self._rendezvous)
            await self._connect_all()
            self.max_context = min(self.max_context, *(r.max_context for r in self.replicas))
            ids = draw_probe_prompt(self._vocabulary, self.max_context)
            params = replace(PROBE_PARAMS, routed_experts_start=0 if self.returns_routed_experts else None)
            for replica in self.replicas:
                completion, _ = await replica.generate(ids, params)
                self.mismatch = check_logprobs(self._model, ids, completion)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self.close()
            if isinstance(error, ServerLost):
                raise ProcessLostError(f"engine server: {error}; {START_HINT}") from None
            raise
        self._watch_task = asyncio.create_task(self._watch_replicas())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Sample one turn.

        Raises:
            UserError: the tokens do not fit, or no server is left.
        """
        requests.check_request(token_ids, params, self._vocabulary, self.max_context)
        completion, reused = await self._generate_anywhere(token_ids, params, session)
        self.meter.sampled += len(completion.token_ids)
        self.meter.reused += reused
        self.meter.prefilled += len(token_ids) - reused
        return completion

    def end_session(self, session: str) -> None:
        for replica in self.replicas:
            replica.sessions.discard(session)

    async def update_weights(self, policy: PreTrainedModel | PeftModel, version: int) -> None:
        """Sample from ``policy`` on all servers from now on. Lost servers are sent it when they come back."""
        async with self._update_lock:
            self._weights.replace(policy)
            self.version = version
            if self._fleet is not None:
                await self._update_fleet(self._fleet)
            elif self._one_by_one:  # all processes of the learner send to each
                for replica in self.replicas:
                    await self._update_replica(replica)
            else:
                await asyncio.gather(*(self._update_replica(r) for r in self.replicas))
        if not self._up:
            await self._wait_for_replica()

    def describe_servers(self) -> dict[str, Any] | None:
        """Return what whoever asks the servers for turns by itself has to know; None where an update awaits all."""
        if self._update == "drain":
            return None
        return {
            "urls": [Secret(r.url).reveal() for r in self.replicas],
            "keys": [find_key(r.url) for r in self.replicas],
            "vocabulary": self._vocabulary,
            "routed_layers": self._layers,
            "adapter": lora_sender.ADAPTER_NAME if lora_sender.find_adapter_rank(self._weights.model) else "",
        }

    def list_up(self) -> list[bool]:
        """List which servers are up, in their order."""
        return [r.up for r in self.replicas]

    def list_servers(self, requests: Sequence[int] = ()) -> list[ProcessActivity]:
        """List what each server is at; ``requests``: turns that players ask each for."""
        return list_servers(self.replicas, requests)

    def read_shards(self, lender: weight_sender.Lender) -> None:
        """Take the weights from a policy that is in shards from now on."""
        self._weights.lender = lender

    async def close(self) -> None:
        """Close the engine: waiting calls raise, and so does every later one. The servers keep running."""
        self._closed, self.on_message = True, _ignore
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.wait({self._watch_task})
        for replica in self.replicas:
            replica.mark_lost("is no longer used: the engine is closed")
        if self._fleet is not None:
            await self._fleet.close()
        await asyncio.gather(*(replica.close() for replica in self.replicas))
        self._weights.close()

    def _make_replica(self, url: str, backend: str, deadline: SyncDeadline) -> Replica:
        return Replica(
            url,
            self._weights,
            capacity=self._capacity_each,
            backend=backend,
            deadline=deadline,
            rendezvous=self._rendezvous,
            on_lost=lambda text: self.on_message(text),
            layers=self._layers,
        )

    async def _generate_anywhere(
        self, token_ids: Sequence[int], params: SamplingParams, session: str
    ) -> tuple[Completion, int]:
        """Sample a turn with the session's server, or with another one if that is lost meanwhile."""
        lost: list[str] = []
        while len(lost) < ATTEMPTS:
            replica = await self._choose_replica(session)
            try:
                return await replica.generate(token_ids, params)
            except ServerLost as error:
                lost.append(str(error))
        raise ProcessLostError(f"engine server: {ATTEMPTS} servers were lost over one turn: {'; '.join(lost)}")

    @property
    def _up(self) -> list[Replica]:
        return [r for r in self.replicas if r.up]

    async def _choose_replica(self, session: str) -> Replica:
        """Choose the server that has the session, or else the one with the fewest."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._watch_task is not None and self._watch_task.done():
            self._watch_task.result()  # raises, if the watch itself has failed
        up = self._up or await self._wait_for_replica()
        replica = next((r for r in up if session in r.sessions), None) or min(up, key=lambda r: len(r.sessions))
        replica.sessions.add(session)
        return replica

    async def _wait_for_replica(self) -> list[Replica]:
        """Wait until a server is up; return those that are."""
        with anyio.move_on_after(self._patience_s):
            while not self._up:
                await self._reconnected.wait()
        if not self._up:
            states = "; ".join(f"{r.url} {r.status}" for r in self.replicas)
            raise ProcessLostError(
                f"engine server: no server is left, for {self._patience_s:g} s: {states}. {START_HINT}"
            )
        return self._up

    async def _await_answer(self, replica: Replica) -> None:
        """Wait for a server that may still be starting."""
        with anyio.move_on_after(self._start_s):
            while not await replica.is_alive():  # noqa: ASYNC110  a server has no event to wait for
                await anyio.sleep(0.5)

    async def _choose_backend(self) -> str:
        """Choose how weights go to the servers, as they were started for.

        Raises:
            UserError: they were started for several ways, or for another one than the setting's.
            ServerLost: one does not answer.
        """
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        cut = torch.cuda.is_available() and world_size > 1  # the model is on the host until then
        has_gpu = self._model.device.type == "cuda" or cut
        if problem := find_setting_problem(self._transfer, has_gpu=has_gpu, world_size=world_size):
            raise UserError(f"engine.weight_transfer {self._transfer}: {problem}")
        offered = await asyncio.gather(*(r.find_backend() for r in self.replicas))
        chosen = {
            choose_backend(self._transfer, r.url, o, has_gpu=has_gpu): r.url
            for r, o in zip(self.replicas, offered, strict=True)
        }
        if len(chosen) > 1:
            starts = ", ".join(f"{url} for {backend}" for backend, url in chosen.items())
            raise UserError(f"all servers are given weights in one way; these were started for several: {starts}")
        (backend,) = chosen
        self._weights.device = torch.device("cuda" if backend in BETWEEN_GPUS else "cpu")
        self._keeps_weights = backend == MEMORY  # a copy, for a server that comes back within a step
        self._one_by_one = backend == M2N
        if backend == M2N and (problem := find_m2n_problem(self._weights.model, world_size)):
            raise UserError(f"weights by nccl_m2n: {problem}; start the servers with: agentrl serve --backend nccl")
        return backend

    async def _connect_all(self) -> None:
        """Send all servers their first weights. Raises ServerLost, UserError."""
        if self._fleet is None:
            await asyncio.gather(*(r.connect(self.version, self._update) for r in self.replicas))
            return
        await self._update_fleet(self._fleet)
        for replica in self.replicas:
            if not replica.up:
                raise ServerLost(f"{replica.url} {replica.status}")

    async def _update_fleet(self, fleet: FleetWeights) -> None:
        """Send the weights to all servers that answer; those that were lost take part again."""
        down = [r for r in self.replicas if not r.up and self._watch_task is not None]
        members = [r for r in self.replicas if r.up or r.answers]
        await fleet.update(members, self.version, self._update)
        for replica in down:
            if replica.up:
                self._welcome(replica)

    async def _update_replica(self, replica: Replica) -> None:
        with suppress(ServerLost):  # it is down now, and is sent them when it is back
            if replica.up:
                await replica.update_weights(self.version, self._update)
            elif not self._keeps_weights and replica.answers:
                await self._reconnect(replica)

    async def _reconnect(self, replica: Replica) -> None:
        await replica.connect(self.version, self._update)
        self._welcome(replica)

    def _welcome(self, replica: Replica) -> None:
        self.on_message(f"{replica.url} is back, with the weights of version {self.version}")
        self._reconnected.set()
        self._reconnected = anyio.Event()

    async def _watch_replicas(self) -> None:
        """Find out which servers are lost, also while no turn is sampled, and which are back."""
        while True:
            await anyio.sleep(CHECK_S)
            await asyncio.gather(*(self._check_replica(r) for r in self.replicas))

    async def _check_replica(self, replica: Replica) -> None:
        was_updating = replica.updating
        alive = await replica.is_alive()
        self.meter.answers += alive
        if replica.up and not (alive or was_updating or replica.updating):
            replica.mark_lost("gives no sign of life")
        elif not replica.up and alive and self._keeps_weights:
            async with self._update_lock:
                try:
                    await self._reconnect(replica)
                except (ServerLost, UserError) as error:
                    replica.status = str(error)


def _ignore(_text: str) -> None: ...
