"""The client of one vLLM server: it samples turns, sends weights, and knows whether the server is up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import anyio
import httpx2

from agentrl.engines.server_keys import ServerAuth
from agentrl.engines.vllm import lora_sender, m2n_sender, requests, weight_sender
from agentrl.engines.vllm.drain import Drain
from agentrl.engines.vllm.keyed_http import GENERATE, KeyedHttp
from agentrl.engines.vllm.lean_http import GivenUp, HttpLost, await_while_up
from agentrl.engines.vllm.rendezvous import ANYWHERE, Rendezvous
from agentrl.engines.vllm.transfer_backend import M2N, MEMORY
from agentrl.engines.vllm.weight_client import HttpTransferClient, SyncDeadline
from agentrl.errors import UserError
from agentrl.runtime.threads import DeadlineExceeded, run_in_thread, with_deadline
from agentrl.settings.secret import Secret
from agentrl.types import Completion, SamplingParams

T = TypeVar("T")
PING_S = 20.0
SHUTDOWN_S = 6.0  # for a sender to let go; vLLM's own gives NCCL 5 s


class ServerLost(Exception):
    """The server is gone, hangs, or was restarted: the request may be made elsewhere."""


class Replica:
    """One of the servers behind a `ServerEngine`.

    Args:
        capacity: requests that are made of it at the same time.
        backend: how tensors travel to it.
        deadline: of a stage of a weight transfer.
        rendezvous: where nccl meets.
        on_lost: called with a sentence when it goes down.
        layers: numbers of the layers whose routed experts are read.
    """

    def __init__(
        self,
        url: str,
        weights: weight_sender.PolicyWeights,
        *,
        capacity: int,
        backend: str,
        deadline: SyncDeadline,
        rendezvous: Rendezvous = ANYWHERE,
        on_lost: Callable[[str], None],
        layers: Sequence[int] = (),
    ) -> None:
        self._layers = layers
        self.url, self.up, self.status = url.rstrip("/"), False, "was not reached yet"
        self.sessions: set[str] = set()
        self.max_context = 1 << 30
        self.version = -1
        self._weights, self._backend, self._rank = weights, backend, lora_sender.find_adapter_rank(weights.model)
        self.answers = False  # when it was last asked whether it is alive
        self.updating = False  # it may give no sign of life meanwhile; each stage has a deadline
        self._deadline, self._rendezvous, self._on_lost = deadline, rendezvous, on_lost
        self._slots, self._drain = anyio.Semaphore(capacity), Drain()
        self._options: dict[str, Any] = {
            "base_url": Secret(self.url).reveal(),
            "trust_env": False,  # no proxy between us
            "auth": ServerAuth(self.url),
        }
        unlimited = httpx2.Limits(max_connections=None, max_keepalive_connections=capacity)
        self._http = httpx2.AsyncClient(**self._options, timeout=httpx2.Timeout(PING_S, read=None), limits=unlimited)
        self._turns = KeyedHttp(self.url, GENERATE)
        self._lost = asyncio.get_running_loop().create_future()
        self._client: HttpTransferClient | None = None
        self._sender: weight_sender.WeightSender | None = None

    async def generate(self, token_ids: Sequence[int], params: SamplingParams) -> tuple[Completion, int]:
        """Sample a turn; return it, and how many of its tokens were in the cache.

        Raises:
            ServerLost: the server is gone or hangs.
        """
        content = requests.write_request(token_ids, params, lora_sender.ADAPTER_NAME if self._rank else "")
        async with self._drain.request(), self._slots:
            found = await self._while_up(self._post(content))
            answer = requests.parse_answer(found, params, len(token_ids), self._layers)
            if answer is None:
                raise self.mark_lost("was restarted, and has its first weights again")
            return answer

    async def _post(self, content: bytes) -> Any:
        """Ask for a turn; return the answer. Raises ServerLost, UserError."""
        try:
            status, body = await self._turns.post(content)
        except HttpLost as error:
            raise self.mark_lost(f"does not answer ({error})") from None
        if status != 200:
            self._check_status(status, GENERATE, body.decode(errors="replace"))
        return json.loads(body)

    async def is_alive(self, timeout_s: float | None = None) -> bool:
        """Return True if the engine behind the server, not only the server, gives a sign of life."""
        try:
            self.answers = (await self._http.get("/weight_info", timeout=timeout_s or PING_S)).status_code == 200
        except httpx2.HTTPError:
            self.answers = False
        return self.answers

    async def connect(self, version: int, update: str) -> None:
        """Connect, and send the current weights.

        Raises:
            ServerLost: the server is gone or hangs.
            UserError: it was started for another kind of training.
        """
        client = await self.prepare()
        self._sender = await self._connect_sender(client)
        await self.update_weights(version, update)
        if self._rank:
            await self._register_adapter()
        self.up = True

    async def prepare(self, slack_s: float = 0.0) -> HttpTransferClient:
        """Prepare for a new sender; return the client that it calls, with so many seconds beyond the deadline.

        Raises:
            ServerLost: the server is gone or hangs.
            UserError: it was started for another kind of training.
        """
        models = await self._call("GET", "/v1/models")
        self.max_context = int(models["data"][0]["max_model_len"])
        await self._check_adapters()
        await self._disconnect()
        if self._lost.done():
            self._lost = asyncio.get_running_loop().create_future()
        await self._call("POST", "/collective_rpc", json={"method": "finish_interrupted_update"})
        self._client = HttpTransferClient(self._options, self._deadline, slack_s)
        return self._client

    async def count_workers(self) -> tuple[int, int]:
        """Count the server's processes with a GPU: copies of the model, and those that share one.

        Raises:
            ServerLost: the server is gone or hangs.
        """
        workers = (await self._call("GET", "/get_world_size"))["world_size"]
        one = (await self._call("GET", "/get_world_size", params={"include_dp": False}))["world_size"]
        return workers // one, one

    def use_backend(self, backend: str, deadline: SyncDeadline) -> None:
        """Send weights by a backend, with its deadline, from now on."""
        self._backend, self._deadline = backend, deadline

    @property
    def requests(self) -> int:
        """Return how many turns it is asked for."""
        return self._drain.running

    @property
    def is_lost(self) -> bool:
        """Return True for a server that was lost, and is not connected again."""
        return self._lost.done()

    async def find_backend(self) -> str:
        """Find how the server was started to be given weights.

        Raises:
            ServerLost: the server is gone or hangs.
        """
        answers = await self._call("POST", "/collective_rpc", json={"method": "get_transfer_backend"})
        return str(answers["results"][0])

    async def update_weights(self, version: int, update: str) -> None:
        """Pause or drain, send the weights, reset the caches, resume.

        Raises:
            ServerLost: the server is gone or hangs.
        """
        assert self._sender is not None
        if self._backend == MEMORY:
            await run_in_thread(self._weights.files)  # before the server waits for them
        async with self.pause(update):
            await self._in_thread(self._sender.send_weights, 4 * self._deadline.stage_s)  # of its own three stages
            await self.resume(version)

    @asynccontextmanager
    async def pause(self, update: str) -> AsyncIterator[None]:
        """Pause or drain the server; in this block it takes weights, and `resume` ends that.

        Raises:
            ServerLost: the server is gone or hangs.
        """
        async with self._drain.finish_requests(update == "drain"):
            if self._lost.done():  # while its requests were finished
                raise ServerLost(f"{self.url} {self.status}")
            self.updating = True
            try:
                await self._call("POST", "/pause", params={"mode": "keep", "clear_cache": True})
                yield
            finally:
                self.updating = False

    async def resume(self, version: int) -> None:
        """Go on with the weights of a version.

        Raises:
            ServerLost: the server is gone or hangs.
        """
        await self._call("POST", "/update_weight_version", json={"new_version": str(version)})
        await self._call("POST", "/reset_prefix_cache", params={"reset_running_requests": True})
        await self._call("POST", "/resume")
        self.version = version

    async def _connect_sender(self, client: HttpTransferClient) -> weight_sender.WeightSender:
        connect: Callable[[], weight_sender.WeightSender]
        if self._backend != M2N or self._rank:
            connect = partial(lora_sender.connect_sender, self._backend, client, self._weights)
        else:
            shape = await self.count_workers()
            meet = partial(self._rendezvous.reserve, self.base_url)
            connect = partial(m2n_sender.M2NSender, client, self._weights, shape, meet, self._deadline)
        return await self._in_thread(connect, 2 * self._deadline.connect_s)

    @property
    def base_url(self) -> str:
        """Return the address with what it hides."""
        return str(self._options["base_url"])

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
        was_up, self.up, self.status = self.up, False, status
        self.sessions.clear()
        if was_up:
            self._on_lost(f"{self.url} {status}: its turns go to other servers until it answers again")
        if not self._lost.done():
            self._lost.set_result(None)
        return ServerLost(f"{self.url} {status}")

    async def close(self) -> None:
        await self._disconnect()
        await self._http.aclose()
        await self._turns.close()

    async def _disconnect(self) -> None:
        sender, client, self._sender, self._client = self._sender, self._client, None, None
        if client is not None:
            client.close()
        await self._weights.abandon()
        if sender is not None:
            with suppress(DeadlineExceeded):  # it holds what a lost server has not let go of
                await with_deadline(SHUTDOWN_S, run_in_thread(sender.shutdown))

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        call = self._http.request(method, path, timeout=self._deadline.stage_s, **options)
        return await self._read_response(call, self._deadline.describe_miss(path))

    async def _while_up(self, call: Awaitable[Any]) -> Any:
        """Await a response, or raise ServerLost as soon as any call finds the server down."""
        try:
            return await await_while_up(call, self._lost)
        except GivenUp:
            raise ServerLost(f"{self.url} {self.status}") from None

    async def _read_response(self, call: Awaitable[httpx2.Response], too_late: str = "") -> Any:
        try:
            response = await call
        except httpx2.TimeoutException as error:
            raise self.mark_lost(too_late or f"does not answer ({type(error).__name__})") from None
        except httpx2.HTTPError as error:
            raise self.mark_lost(f"does not answer ({type(error).__name__})") from None
        self._check_status(response.status_code, response.request.url.path, response.text)
        return response.json() if "json" in response.headers.get("content-type", "") else response.text

    def _check_status(self, status: int, path: str, text: str) -> None:
        """Raise what an answer of that status means, unless it is fine."""
        if status in (400, 404, 422):
            raise UserError(f"{self.url} refuses {path}: {text:.300}; {START_HINT}")
        if status in (401, 403):
            raise UserError(f"{self.url} refuses the key: {text.strip():.300}")
        if status != 200:
            raise self.mark_lost(f"answered {status} to {path}: {text:.200}")

    async def _in_thread(self, function: Callable[[], T], seconds: float) -> T:
        """Call the sender in a thread. One that hangs is left behind: nothing else waits for it.

        Raises:
            ServerLost: one of its calls has failed, or it takes longer than so many seconds.
        """
        assert self._client is not None
        failed = self._client.failure
        task = asyncio.ensure_future(run_in_thread(function))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # marks it as read
        waited: set[asyncio.Future[Any]] = {task, asyncio.wrap_future(failed)}
        try:
            await asyncio.wait(waited, timeout=seconds, return_when="FIRST_COMPLETED")
            if failed.done():
                raise self.mark_lost(failed.result())
            if not task.done():
                raise self.mark_lost(f"was not given all weights in {seconds:.3g} s")
            return task.result()
        finally:
            task.cancel()


START_HINT = "start it with: agentrl serve --model MODEL"
