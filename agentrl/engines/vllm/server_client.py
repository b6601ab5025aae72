"""The client of one vLLM server: it samples turns, sends weights, and knows whether the server is up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
import httpx2
from anyio import to_thread

from agentrl.engines.server_keys import ServerAuth
from agentrl.engines.vllm import lora_sender, requests, weight_sender
from agentrl.engines.vllm.drain import Drain
from agentrl.errors import UserError
from agentrl.settings.secret import Secret
from agentrl.types import Completion, SamplingParams

T = TypeVar("T")
ANSWER_S = 300.0  # for a call about weights: tensors may be many
PING_S = 20.0


class ServerLost(Exception):
    """The server is gone, hangs, or was restarted: the request may be made elsewhere."""


class Replica:
    """One of the servers behind a `ServerEngine`.

    Args:
        capacity: requests that are made of it at the same time.
        backend: how tensors travel to it.
    """

    def __init__(self, url: str, weights: weight_sender.PolicyWeights, *, capacity: int, backend: str) -> None:
        self.url, self.up, self.status = url.rstrip("/"), False, "was not reached yet"
        self.sessions: set[str] = set()
        self.max_context = 1 << 30
        self.version = -1
        self._weights, self._backend, self._rank = weights, backend, lora_sender.find_adapter_rank(weights.model)
        self._slots, self._drain = anyio.Semaphore(capacity), Drain()
        self._options: dict[str, Any] = {
            "base_url": Secret(self.url).reveal(),
            "trust_env": False,  # no proxy between us
            "auth": ServerAuth(self.url),
        }
        unlimited = httpx2.Limits(max_connections=None, max_keepalive_connections=capacity)
        self._http = httpx2.AsyncClient(**self._options, timeout=httpx2.Timeout(PING_S, read=None), limits=unlimited)
        self._lost = asyncio.get_running_loop().create_future()
        self._thread_limiter = anyio.CapacityLimiter(1)
        self._client: _HttpClient | None = None
        self._sender: weight_sender.WeightSender | None = None

    async def generate(self, token_ids: list[int], params: SamplingParams) -> tuple[Completion, int]:
        """Sample a turn; return it, and how many of its tokens were in the cache.

        Raises:
            ServerLost: the server is gone or hangs.
        """
        body: dict[str, object] = {
            "token_ids": token_ids,
            "sampling_params": {**requests.build_sampling_params(params), **requests.build_text_params(params)},
        }
        if self._rank:
            body["model"] = lora_sender.ADAPTER_NAME
        async with self._drain.request(), self._slots:
            response = await self._while_up(self._http.post("/inference/v1/generate", json=body))
            choice = response["choices"][0]
            spans = [(s["version"], s["start"], s["end"]) for s in choice["weight_versions"] or ()]
            if any(not version.isdecimal() for version, _, _ in spans):
                raise self.mark_lost("was restarted, and has its first weights again")
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            completion = requests.build_completion(choice["token_ids"], logprobs, spans, params)
            return completion, int((response["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    async def is_alive(self) -> bool:
        """Return True if the engine behind the server, not only the server, gives a sign of life."""
        try:
            return bool((await self._http.get("/weight_info", timeout=PING_S)).status_code == 200)
        except httpx2.HTTPError:
            return False

    async def connect(self, version: int, update: str) -> None:
        """Connect, and send the current weights.

        Raises:
            ServerLost: the server is gone or hangs.
            UserError: it was started for another kind of training.
        """
        models = await self._call("GET", "/v1/models")
        self.max_context = int(models["data"][0]["max_model_len"])
        await self._check_adapters()
        world_size = (await self._call("GET", "/get_world_size"))["world_size"] if self._backend == "nccl" else 1
        self._disconnect()
        self._client = _HttpClient(self._options)
        self._sender = await self._in_thread(
            lora_sender.connect_sender,
            self._backend,
            self._client,
            self._weights,
            **self._choose_rendezvous(world_size),
        )
        await self.update_weights(version, update)
        if self._rank:
            await self._register_adapter()
        if self._lost.done():
            self._lost = asyncio.get_running_loop().create_future()
        self.up = True

    async def update_weights(self, version: int, update: str) -> None:
        """Pause or drain, send the weights, reset the caches, resume.

        Raises:
            ServerLost: the server is gone or hangs.
        """
        assert self._sender is not None
        async with self._drain.finish_requests(update == "drain"):
            await self._call("POST", "/pause", params={"mode": "keep", "clear_cache": True}, timeout=None)
            await self._in_thread(self._sender.send_weights)
            await self._call("POST", "/update_weight_version", json={"new_version": str(version)})
            await self._call("POST", "/reset_prefix_cache", params={"reset_running_requests": True})
            await self._call("POST", "/resume")
            self.version = version

    async def _check_adapters(self) -> None:
        """Raise UserError if the server was started for another kind of training."""
        ranks = await self._call("POST", "/collective_rpc", json={"method": "get_max_adapter_rank"})
        max_rank = int(ranks["results"][0])
        if self._rank > max_rank:
            has = f"adapters of rank {max_rank} at most" if max_rank else "no adapters"
            raise UserError(
                f"{self.url} was started for {has}; start it with: agentrl serve --model MODEL --lora_rank {self._rank}"
            )
        if max_rank and not self._rank:
            raise UserError(
                f"{self.url} was started with --lora_rank, and takes adapters only; leave that out, or train one with "
                "--lora.rank"
            )

    async def _register_adapter(self) -> None:
        """Let requests name the adapter. It is there already: the path is not read."""
        adapter = {"lora_name": lora_sender.ADAPTER_NAME, "lora_path": "sent by the trainer"}
        with suppress(UserError):  # it has that name already
            await self._call("POST", "/v1/load_lora_adapter", json=adapter)

    def mark_lost(self, status: str) -> ServerLost:
        """Mark the server as down: waiting calls raise, its sessions go elsewhere. Return the exception to raise."""
        self.up, self.status = False, status
        self.sessions.clear()
        if not self._lost.done():
            self._lost.set_result(None)
        return ServerLost(f"{self.url} {status}")

    async def close(self) -> None:
        self._disconnect()
        await self._http.aclose()

    def _disconnect(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()
        if self._client is not None:
            self._client.close()
        self._sender = self._client = None

    async def _call(self, method: str, path: str, *, timeout: float | None = ANSWER_S, **options: Any) -> Any:
        return await self._read_response(self._http.request(method, path, timeout=timeout, **options))

    async def _while_up(self, call: Awaitable[httpx2.Response]) -> Any:
        """Await a response, or raise ServerLost as soon as any call finds the server down."""
        task = asyncio.ensure_future(self._read_response(call))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # marks it as read
        try:
            await asyncio.wait({task, self._lost}, return_when="FIRST_COMPLETED")
            if not task.done():
                raise ServerLost(f"{self.url} {self.status}")
            return task.result()
        finally:
            if not task.done():
                task.cancel()  # the server aborts the request when the connection closes

    async def _read_response(self, call: Awaitable[httpx2.Response]) -> Any:
        try:
            response = await call
        except httpx2.HTTPError as error:
            raise self.mark_lost(f"does not answer ({type(error).__name__})") from None
        if response.status_code in (400, 404, 422):
            raise UserError(f"{self.url} refuses {response.request.url.path}: {response.text:.300}; {START_HINT}")
        if response.status_code in (401, 403):
            raise UserError(f"{self.url} refuses the key: {response.text.strip():.300}")
        if response.status_code != 200:
            raise self.mark_lost(
                f"answered {response.status_code} to {response.request.url.path}: {response.text:.200}"
            )
        return response.json() if "json" in response.headers.get("content-type", "") else response.text

    async def _in_thread(self, function: Callable[..., T], *arguments: object, **named: object) -> T:
        try:
            return await to_thread.run_sync(partial(function, *arguments, **named), limiter=self._thread_limiter)
        except httpx2.HTTPError as error:
            raise self.mark_lost(f"could not be given weights ({error})") from None

    def _choose_rendezvous(self, world_size: int) -> dict[str, object]:
        """Choose where vLLM's nccl backend meets: this machine's address, as the server sees it, and a free port."""
        if self._backend != "nccl":
            return {}
        server = urlsplit(self.url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route, socket.socket() as port:
            route.connect((server.hostname, server.port or 80))
            port.bind(("", 0))
            address, free = route.getsockname()[0], port.getsockname()[1]
        return {"master_address": address, "master_port": free, "world_size": 1 + world_size}


class _HttpClient:
    """The `TransferClient` of a server: HTTP calls from the sender's thread."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._http = httpx2.Client(**options, timeout=ANSWER_S)

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", {})

    def update_weights(self, update_info: object) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update", {"weight_version": weight_version})

    def receive_adapter(self, message: str) -> list[str]:
        response = self._post("/collective_rpc", {"method": "receive_adapter", "args": [message]})
        answers: list[str] = response.json()["results"]
        return answers

    def close(self) -> None:
        self._http.close()

    def _post(self, path: str, body: dict[str, object]) -> httpx2.Response:
        return self._http.post(path, json=body).raise_for_status()


START_HINT = "start it with: agentrl serve --model MODEL"
