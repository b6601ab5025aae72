"""One vLLM server, as a fleet sees it: asked for turns, given weights, up or down."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx2
from anyio import to_thread

from agentrl.engines import adapter, requests, transfer
from agentrl.errors import UserError
from agentrl.types import Completion, SamplingParams

ANSWER_S = 300.0  # for a call about weights: tensors may be many
PING_S = 20.0


class Lost(Exception):
    """The server is gone, hangs, or was restarted: the request may be made elsewhere."""


class Replica:
    """A server at ``url``.

    Args:
        capacity: requests that are made of it at the same time.
        backend: how tensors travel to it.
    """

    def __init__(self, url: str, weights: transfer.Weights, *, capacity: int, backend: str) -> None:
        self.url, self.up, self.said = url.rstrip("/"), False, "was not reached yet"
        self.sessions: set[str] = set()
        self.max_context = 1 << 30
        self.version = -1
        self._weights, self._backend, self._rank = weights, backend, adapter.rank_of(weights.model)
        self._room = anyio.Semaphore(capacity)
        key = os.environ.get("VLLM_API_KEY")
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "trust_env": False,  # no proxy between us
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
        }
        unlimited = httpx2.Limits(max_connections=None, max_keepalive_connections=capacity)
        self._http = httpx2.AsyncClient(**self._options, timeout=httpx2.Timeout(PING_S, read=None), limits=unlimited)
        self._down = asyncio.get_running_loop().create_future()
        self._threads = anyio.CapacityLimiter(1)
        self._client: _Client | None = None
        self._sender: transfer.Sender | None = None

    async def generate(self, token_ids: list[int], params: SamplingParams) -> tuple[Completion, int]:
        """A turn, and how many of its tokens were found in the cache. Raises Lost."""
        asked = {"token_ids": token_ids, "sampling_params": {**requests.sampling(params), "detokenize": False}}
        if self._rank:
            asked["model"] = adapter.NAME
        async with self._room:
            answer = await self._while_up(self._http.post("/inference/v1/generate", json=asked))
            choice = answer["choices"][0]
            spans = [(s["version"], s["start"], s["end"]) for s in choice["weight_versions"] or ()]
            if any(not version.isdecimal() for version, _, _ in spans):
                raise self.lost("was restarted, and has its first weights again")
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            done = requests.completion(choice["token_ids"], logprobs, spans, params)
            return done, int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    async def answers(self) -> bool:
        """Whether its engine, not only its door, gives a sign of life."""
        try:
            return bool((await self._http.get("/weight_info", timeout=PING_S)).status_code == 200)
        except httpx2.HTTPError:
            return False

    async def join(self, version: int, update: str) -> None:
        """Connect, and give it the current weights. Raises Lost."""
        served = await self._call("GET", "/v1/models")
        self.max_context = int(served["data"][0]["max_model_len"])
        await self._check_adapters()
        world = (await self._call("GET", "/get_world_size"))["world_size"] if self._backend == "nccl" else 1
        self._disconnect()
        self._client = _Client(self._options)
        self._sender = await self._in_thread(
            adapter.sender, self._backend, self._client, self._weights, **self._rendezvous(world)
        )
        await self.update(version, update)
        if self._rank:
            await self._name_adapter()
        if self._down.done():
            self._down = asyncio.get_running_loop().create_future()
        self.up = True

    async def update(self, version: int, update: str) -> None:
        """Pause or drain, weights, caches, resume. Raises Lost."""
        assert self._sender is not None
        mode = "keep" if update == "in-flight" else "wait"
        await self._call("POST", "/pause", params={"mode": mode, "clear_cache": True}, timeout=None)
        await self._in_thread(self._sender.send_weights)
        await self._call("POST", "/update_weight_version", json={"new_version": str(version)})
        await self._call("POST", "/reset_prefix_cache", params={"reset_running_requests": True})
        await self._call("POST", "/resume")
        self.version = version

    async def _check_adapters(self) -> None:
        """Raises UserError where the server was started for another kind of training."""
        rooms = await self._call("POST", "/collective_rpc", json={"method": "adapter_room"})
        room = int(rooms["results"][0])
        if self._rank > room:
            has = f"adapters of rank {room} at most" if room else "no adapters"
            raise UserError(
                f"{self.url} was started for {has}; start it with: agentrl serve --model MODEL --lora_rank {self._rank}"
            )
        if room and not self._rank:
            raise UserError(
                f"{self.url} was started with --lora_rank, and takes adapters only; leave that out, or train one with "
                "--lora.rank"
            )

    async def _name_adapter(self) -> None:
        """Requests may ask for the adapter from now on. It is there already: the path is not looked at."""
        named = {"lora_name": adapter.NAME, "lora_path": "sent by the trainer"}
        with suppress(UserError):  # it has that name already
            await self._call("POST", "/v1/load_lora_adapter", json=named)

    def lost(self, why: str) -> Lost:
        """From now on it is down: who waits for it is told, its sessions go elsewhere."""
        self.up, self.said = False, why
        self.sessions.clear()
        if not self._down.done():
            self._down.set_result(None)
        return Lost(f"{self.url} {why}")

    async def close(self) -> None:
        self._disconnect()
        await self._http.aclose()

    def _disconnect(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()
        if self._client is not None:
            self._client.close()
        self._sender = self._client = None

    async def _call(self, method: str, path: str, *, timeout: float | None = ANSWER_S, **more: Any) -> Any:
        return await self._answer(self._http.request(method, path, timeout=timeout, **more))

    async def _while_up(self, call: Any) -> Any:
        """An answer, or the news that it is down, from whoever finds out first."""
        task = asyncio.ensure_future(self._answer(call))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # nobody may be left to read it
        try:
            await asyncio.wait({task, self._down}, return_when="FIRST_COMPLETED")
            if not task.done():
                raise Lost(f"{self.url} {self.said}")
            return task.result()
        finally:
            if not task.done():
                task.cancel()  # the server is told by the connection's end

    async def _answer(self, call: Any) -> Any:
        try:
            response = await call
        except httpx2.HTTPError as error:
            raise self.lost(f"does not answer ({type(error).__name__})") from None
        if response.status_code in (400, 404, 422):
            raise UserError(f"{self.url} refuses {response.request.url.path}: {response.text:.300}; {HOW}")
        if response.status_code != 200:
            raise self.lost(f"answered {response.status_code} to {response.request.url.path}: {response.text:.200}")
        return response.json() if "json" in response.headers.get("content-type", "") else response.text

    async def _in_thread(self, function: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return await to_thread.run_sync(partial(function, *arguments, **named), limiter=self._threads)
        except httpx2.HTTPError as error:
            raise self.lost(f"could not be given weights ({error})") from None

    def _rendezvous(self, world: int) -> dict[str, Any]:
        """Where vLLM's nccl backend meets: this machine's address, as the server sees it, and a free port."""
        if self._backend != "nccl":
            return {}
        at = urlsplit(self.url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route, socket.socket() as port:
            route.connect((at.hostname, at.port or 80))
            port.bind(("", 0))
            address, free = route.getsockname()[0], port.getsockname()[1]
        return {"master_address": address, "master_port": free, "world_size": 1 + world}


class _Client:
    """A sender's calls, from its thread."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._http = httpx2.Client(**options, timeout=ANSWER_S)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update", {"weight_version": weight_version})

    def receive_adapter(self, message: str) -> list[str]:
        answer = self._post("/collective_rpc", {"method": "receive_adapter", "args": [message]})
        said: list[str] = answer.json()["results"]
        return said

    def close(self) -> None:
        self._http.close()

    def _post(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        return self._http.post(path, json=body).raise_for_status()


HOW = "start it with: agentrl serve --model MODEL"
