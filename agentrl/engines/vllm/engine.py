"""vLLM in this process's care: its AsyncLLM, whose model lives in a process of its own.

Token ids go in; token ids and logprobs of the distribution that was sampled from come out. The weights are the
learner's: at the start, and by ``update_weights`` in place. A request that is running then goes on with the new ones
after milliseconds, all it had computed with the old ones computed again; each token says which version sampled it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any, Literal, Self

import anyio
from anyio import to_thread

from agentrl.engine import Meter
from agentrl.engines import adapter, launch, requests
from agentrl.engines.probe import PROBE, Mismatch, compare, probe_ids
from agentrl.errors import UserError
from agentrl.learner.logprobs import causal_lm
from agentrl.types import Completion, SamplingParams

Update = Literal["in-flight", "drain"]
SHARE = 0.5  # of a GPU's memory, where the learner is on the same one
CLOSE_S = 5.0  # for vLLM's process to end by itself


class VLLMEngine:
    """Samples with vLLM. An async context manager: entering it starts vLLM, leaving it ends its process.

    Args:
        model: a causal LM of transformers; vLLM gets its configuration and its weights.
        capacity: rows sampled at the same time.
        max_context: positions a row may have; the model's own limit by default.
        threads: threads of vLLM's process on the CPU; 1 for a small model, otherwise one a core.
        update: what an update of the weights does to requests that are running: they go on with the new weights
            ("in-flight"), or are finished first ("drain").
        stall_s: half of it without an answer, and a request asks vLLM for a sign of life; twice of it, and it has died.
    """

    def __init__(
        self,
        model: Any,
        *,
        capacity: int = 128,
        max_context: int | None = None,
        threads: int | None = None,
        update: Update = "in-flight",
        stall_s: float = 60.0,
    ) -> None:
        self._model = causal_lm(model)
        self._config = self._model.config.get_text_config()
        limit = int(self._config.max_position_embeddings)
        self.capacity, self.max_context = capacity, min(max_context or limit, limit)
        self.version, self.meter = 0, Meter()
        self.mismatch: Mismatch | None = None  # to a forward pass of transformers, measured at the start
        self._vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        self._threads, self._update, self._stall_s = threads, update, stall_s
        self._shares_gpu, self._asleep = self._model.device.type == "cuda", False
        self._weights = adapter.weights_of(model)
        self._rank = adapter.rank_of(model)
        self._llm: Any = None
        self._slot: Any = None  # of the adapter
        self._processes: list[Any] = []
        self._failure: asyncio.Future[None] | None = None  # a UserError, when vLLM is no more
        self._running: set[asyncio.Task[Any]] = set()
        self._count = 0
        self._did = "was started"
        self._did_at = perf_counter()
        self._turn = anyio.Lock()

    async def __aenter__(self) -> Self:
        vllm = launch.require()
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()
        self._failure.add_done_callback(lambda f: f.cancelled() or f.exception())  # nobody may be left to read it
        try:
            with anyio.CancelScope(shield=True):  # a thread cannot be cancelled; what it started is to be ended
                await to_thread.run_sync(self._start)
            for process in self._processes:
                self._loop.add_reader(process.sentinel, self._on_death, process)
            self._sender = await to_thread.run_sync(
                adapter.sender, launch.default_backend(self._model), _Client(self), self._weights
            )
            await self.update_weights(self._weights.model, 0)
            await self._measure()
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self.close()
            if isinstance(error, UserError | asyncio.CancelledError):
                raise
            raise UserError(f"engine vllm: vLLM {vllm.__version__} does not start: {_told(error)}") from error
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Sample one turn. Raises UserError where the tokens do not fit, and when vLLM is no more."""
        requests.check(token_ids, params, self._vocabulary, self.max_context)
        self._count += 1
        output = await self._alive(self._finished(list(token_ids), params, f"{session}-{self._count}"))
        done = output.outputs[0]
        reused = output.num_cached_tokens or 0
        self.meter.sampled += len(done.token_ids)
        self.meter.reused += reused
        self.meter.prefilled += len(token_ids) - reused
        logprobs = [entry[token].logprob for entry, token in zip(done.logprobs, done.token_ids, strict=True)]
        spans = [(s.version, s.start, s.end) for s in done.weight_versions or ()]
        return requests.completion(done.token_ids, logprobs, spans, params)

    def end_session(self, session: str) -> None:
        """Nothing: vLLM's prefix cache forgets what was used longest ago."""

    async def update_weights(self, policy: Any, version: int) -> None:
        """Sample from ``policy`` from now on; it may change again as soon as this returns."""
        async with self._turn:
            await self._alive(self._updated(policy, version))
            self.version = version

    async def sleep(self) -> None:
        """On the learner's own GPU: lend it the memory, until the next weights. Nothing may be running."""
        if self._shares_gpu and not self._asleep:
            await self._alive(self._llm.sleep(level=1))
            self._asleep = True

    async def close(self) -> None:
        """End vLLM's process. Waiting calls raise, and so does every later one."""
        self._fail(RuntimeError("the engine is closed"))
        llm, self._llm = self._llm, None
        for process in self._processes:
            self._loop.remove_reader(process.sentinel)
        if llm is not None:
            with anyio.CancelScope(shield=True):
                if llm.output_handler is not None:
                    llm.output_handler.cancel()
                await to_thread.run_sync(self._end, llm)
                await asyncio.sleep(0)  # its sockets are closed from the loop
                llm.engine_core.resources.ctx.destroy(linger=0)
        self._weights.close()

    # -- in the event loop -----------------------------------------------------------------------------------------

    async def _finished(self, token_ids: list[int], params: SamplingParams, request: str) -> Any:
        """vLLM's output of a request. Cancelled, it takes the request back."""
        from vllm import SamplingParams as Params
        from vllm.sampling_params import RequestOutputKind

        asked = Params(
            **requests.sampling(params), detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True
        )
        prompt = {"prompt_token_ids": token_ids}
        (output,) = [o async for o in self._llm.generate(prompt, asked, request, lora_request=self._slot)]
        return output

    async def _updated(self, policy: Any, version: int) -> None:
        self._doing(f"was given the weights of version {version}")
        try:
            await self._replaced(policy, version)
        except BaseException:
            self._fail(
                RuntimeError(f"the update to version {version} was not finished; vLLM holds half of the weights")
            )
            raise

    async def _replaced(self, policy: Any, version: int) -> None:
        await self._llm.pause_generation(mode="keep" if self._update == "in-flight" else "wait", clear_cache=True)
        await self._wake("weights")
        self._weights.replace(policy)
        await to_thread.run_sync(self._sender.send_weights)
        self._weights.close()
        await self._llm.update_weight_version(str(version))
        await self._wake("kv_cache")
        self._asleep = False
        await self._llm.reset_prefix_cache(reset_running_requests=True)
        await self._llm.resume_generation()

    async def _wake(self, part: str) -> None:
        if self._asleep:
            await self._llm.wake_up([part])

    async def _measure(self) -> None:
        """Whether the logprobs are those of the distribution that is sampled from, and how far off they are."""
        ids = probe_ids(self._vocabulary, self.max_context)
        done = await self.generate(ids, PROBE, session="probe")
        self.mismatch = compare(self._model, ids, done)
        self.meter = Meter()

    async def _alive(self, work: Any) -> Any:
        """The result of ``work``, in a task of its own, as long as vLLM gives a sign of life now and then.

        The task is cancelled once, not again and again as a scope of anyio does: vLLM has to be told, which takes an
        await.
        """
        assert self._failure is not None
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # nobody may be left to read it
        self._running.add(task)
        try:
            while not task.done():
                if self._failure.done():
                    break
                await asyncio.wait({task, self._failure}, timeout=self._stall_s / 2, return_when="FIRST_COMPLETED")
                if not task.done() and not self._failure.done():
                    await self._ping()
            if not task.done():
                await self._failure
            return await self._result(task)
        finally:
            self._running.discard(task)
            if not task.done():
                task.cancel()

    async def _result(self, task: asyncio.Task[Any]) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return task.result()
        except EngineDeadError:
            await self._mourn(self._processes[0])
            raise self._failure.exception() from None  # type: ignore[union-attr, misc]

    async def _ping(self) -> None:
        asked = asyncio.ensure_future(self._llm.get_weight_version())
        asked.add_done_callback(lambda t: t.cancelled() or t.exception())
        done, _ = await asyncio.wait({asked}, timeout=1.5 * self._stall_s)
        if not done:
            self._fail(UserError(self._obituary(f"gave no sign of life for {2 * self._stall_s:g} s")))
        else:
            self.meter.answers += 1

    def _on_death(self, process: Any) -> None:
        self._loop.remove_reader(process.sentinel)
        self._mourning = asyncio.create_task(self._mourn(process))

    async def _mourn(self, process: Any) -> None:
        for _ in range(50):  # its end is seen before its exit status is
            if process.exitcode is not None:
                break
            await asyncio.sleep(0.02)
        self._fail(UserError(self._obituary(f"died ({launch.ending(process.exitcode)})")))

    def _obituary(self, what: str) -> str:
        ago = perf_counter() - self._did_at
        return (
            f"engine vllm: vLLM's process {what}. It last {self._did}, {ago:.0f} s before; {len(self._running)} calls "
            "were waiting. What it wrote stands above; VLLM_LOGGING_LEVEL=INFO makes it say more"
        )

    def _fail(self, error: Exception) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    def _doing(self, what: str) -> None:
        self._did, self._did_at = what, perf_counter()

    # -- in a thread -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        dtype = next(self._model.parameters()).dtype
        threads = launch.threads_for(sum(p.numel() for p in self._model.parameters()), self._threads)
        with tempfile.TemporaryDirectory(prefix="agentrl-vllm-") as folder:
            launch.write_config(self._model, folder)
            if self._rank:
                launch.write_base(self._model, folder)
            given = launch.settings(
                folder,
                dtype,
                max_context=self.max_context,
                capacity=self.capacity,
                cache_bytes=launch.cache_bytes(self._config, dtype, self.capacity * self.max_context),
                backend=launch.default_backend(self._model),
                rank=self._rank,
            )
            with launch.environment(threads), launch.undisturbed(), launch.interrupts_blocked():
                arguments = AsyncEngineArgs(
                    **given,
                    **({"enable_sleep_mode": True, "gpu_memory_utilization": SHARE} if self._shares_gpu else {}),
                    skip_tokenizer_init=True,
                    load_format="auto" if self._rank else "dummy",
                    use_tqdm_on_load=False,
                    disable_log_stats=True,
                )
                self._llm = AsyncLLM.from_engine_args(arguments)
        if self._rank:
            from vllm.lora.request import LoRARequest

            self._slot = LoRARequest(adapter.NAME, adapter.SLOT, "sent by the trainer")
        manager = self._llm.engine_core.resources.engine_manager
        self._processes = list(manager.processes) if manager is not None else []

    def _end(self, llm: Any) -> None:
        llm.shutdown(timeout=0)  # there is nothing to be finished
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(CLOSE_S)


class _Client:
    """A sender's calls, from its thread into the event loop."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._call("init_weight_transfer_engine", WeightTransferInitRequest(init_info=init_info))

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._call("update_weights", WeightTransferUpdateRequest(update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version)

    def receive_adapter(self, message: str) -> list[str]:
        said: list[str] = self._call("collective_rpc", "receive_adapter", None, (message,))
        return said

    def _call(self, name: str, *arguments: Any) -> Any:
        engine = self._engine
        call = partial(getattr(engine._llm, name), *arguments)
        return asyncio.run_coroutine_threadsafe(_within_failure(engine, call), engine._loop).result()


async def _within_failure(engine: VLLMEngine, call: Any) -> Any:
    """A call, or the engine's death: a thread that waits for an answer cannot be cancelled."""
    task = asyncio.ensure_future(call())
    assert engine._failure is not None
    await asyncio.wait({task, engine._failure}, return_when="FIRST_COMPLETED")
    if task.done():
        return task.result()
    task.cancel()
    return await engine._failure


def _told(error: BaseException) -> str:
    """The innermost cause in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
