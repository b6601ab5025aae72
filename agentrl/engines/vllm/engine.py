"""vLLM run by this process: its AsyncLLM, whose model lives in a process of its own.

Token ids go in; token ids and logprobs of the distribution that was sampled from come out. The weights are the
learner's: at the start, and after each ``update_weights``, in place. A running request then goes on with the new ones
after milliseconds: what it had computed with the old ones is computed again. Each token has the version that sampled
it.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import anyio
import torch
from anyio import to_thread

from agentrl.engines.vllm import launch, lora_sender, requests
from agentrl.engines.vllm.drain import Drain
from agentrl.engines.vllm.gpu_share import GpuShare
from agentrl.engines.vllm.logprob_check import PROBE_PARAMS, LogprobMismatch, check_logprobs, draw_probe_prompt
from agentrl.errors import UserError
from agentrl.models.lm_head import unwrap_model
from agentrl.rollout.engine_protocol import Meter
from agentrl.types import Completion, SamplingParams

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
UpdateMode = Literal["in-flight", "drain"]
CLOSE_S = 5.0  # for vLLM's process to end by itself


class VLLMEngine:
    """An engine that samples with vLLM. Entering its async context starts vLLM, leaving it ends vLLM's process.

    Args:
        model: a causal LM of transformers; vLLM gets its configuration and its weights.
        capacity: rows sampled at the same time.
        max_context: positions a row may have; the model's own limit by default.
        threads: threads of vLLM's process on the CPU; 1 for a small model, otherwise one a core.
        update: what an update of the weights does to requests that are running: they go on with the new weights
            ("in-flight"), or are finished first ("drain").
        stall_timeout_s: after half of it without an answer, a request asks vLLM for a sign of life; after
            twice of it, vLLM has died.
        gpu_share: how a GPU is divided that is the learner's too; half of it by default.
        return_routed_experts: let vLLM say which experts the routers chose.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        capacity: int = 128,
        max_context: int | None = None,
        threads: int | None = None,
        update: UpdateMode = "in-flight",
        stall_timeout_s: float = 60.0,
        gpu_share: GpuShare | None = None,
        return_routed_experts: bool = False,
    ) -> None:
        self._model = unwrap_model(model)
        self.returns_routed_experts = return_routed_experts
        self._layers: tuple[int, ...] = ()  # that route
        if return_routed_experts:
            self._layers = launch.find_routed_layers(self._model, on_cpu=self._model.device.type == "cpu")
        self._config = self._model.config.get_text_config()
        limit = int(self._config.max_position_embeddings)
        self.capacity, self.max_context = capacity, min(max_context or limit, limit)
        self.version, self.meter = 0, Meter()
        self.mismatch: LogprobMismatch | None = None  # to a forward pass of transformers, measured at the start
        self._vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        self._threads, self._update, self._stall_timeout_s = threads, update, stall_timeout_s
        self._shares_gpu, self._asleep = self._model.device.type == "cuda", False
        self.gpu_share = gpu_share
        self._weights = lora_sender.select_weights(model)
        self._rank = lora_sender.find_adapter_rank(model)
        self._llm: AsyncLLM = None
        self._lora_request: LoRARequest | None = None  # names the adapter's slot
        self._processes: list[Any] = []
        self._failure: asyncio.Future[None] | None = None  # a UserError, when vLLM's process is gone
        self._calls: set[asyncio.Task[object]] = set()
        self._count = 0
        self._last_action = "was started"
        self._last_action_at = perf_counter()
        self._update_lock, self._drain = anyio.Lock(), Drain()
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the configuration, until vLLM has answered

    async def __aenter__(self) -> Self:
        vllm = launch.import_vllm()
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()
        self._failure.add_done_callback(lambda f: f.cancelled() or f.exception())  # marks it as read
        try:
            with anyio.CancelScope(shield=True):  # a thread cannot be cancelled; what it started is to be ended
                await to_thread.run_sync(self._start)
            for process in self._processes:
                self._loop.add_reader(process.sentinel, self._start_exit_task, process)
            self._sender = await to_thread.run_sync(
                lora_sender.connect_sender,
                launch.choose_transfer_backend(self._model),
                _EngineClient(self),
                self._weights,
            )
            await self.update_weights(self._weights.model, 0)
            await self._check_logprobs()
            self._remove_folder()  # vLLM reads it once more after it has said that it is ready
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self.close()
            if isinstance(error, UserError | asyncio.CancelledError):
                raise
            raise UserError(
                f"engine vllm: vLLM {vllm.__version__} does not start: {_innermost_message(error)}"
            ) from error
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Sample one turn.

        Raises:
            UserError: the tokens do not fit, or vLLM's process is gone.
        """
        requests.check_request(token_ids, params, self._vocabulary, self.max_context)
        self._count += 1
        request = f"{session}-{self._count}"
        async with self._drain.request():
            output = await self._while_alive(self._run_request(list(token_ids), params, request))
        sampled = output.outputs[0]
        reused = output.num_cached_tokens or 0
        self.meter.sampled += len(sampled.token_ids)
        self.meter.reused += reused
        self.meter.prefilled += len(token_ids) - reused
        logprobs = [entry[token].logprob for entry, token in zip(sampled.logprobs, sampled.token_ids, strict=True)]
        spans = [(s.version, s.start, s.end) for s in sampled.weight_versions or ()]
        routed = None
        if params.routed_experts_start is not None:
            tokens = len(token_ids) + len(sampled.token_ids)
            routed = requests.read_experts(sampled.routed_experts, tokens, params, self._layers)
        return requests.build_completion(sampled.token_ids, logprobs, spans, params, routed)

    def end_session(self, session: str) -> None:
        """Keep everything: vLLM's prefix cache drops what was used longest ago."""

    async def update_weights(self, policy: PreTrainedModel | PeftModel, version: int) -> None:
        """Sample from ``policy`` from now on; it may change again as soon as this returns."""
        async with self._update_lock, self._drain.finish_requests(self._update == "drain"):
            await self._while_alive(self._replace_or_fail(policy, version))
            self.version = version

    async def sleep(self) -> None:
        """Lend the memory of a GPU that is also the learner's, until the next weights. Nothing may be running."""
        if self._shares_gpu and not self._asleep:
            level = 1 if self._rank else 2  # the base of an adapter is kept on the CPU; other weights will be sent
            await self._while_alive(self._llm.sleep(level=level))
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
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    # -- in the event loop -----------------------------------------------------------------------------------------

    async def _run_request(self, token_ids: list[int], params: SamplingParams, request: str) -> RequestOutput:
        """Run a request; return vLLM's output. If cancelled, vLLM aborts the request."""
        from vllm import SamplingParams as VLLMParams
        from vllm.sampling_params import RequestOutputKind

        vllm_params = VLLMParams(
            **requests.build_sampling_params(params),
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE if params.stop else RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        prompt = {"prompt_token_ids": token_ids}
        read = 0
        async for output in self._llm.generate(prompt, vllm_params, request, lora_request=self._lora_request):
            if (stop := params.stop) and not output.finished:  # vLLM has no tokenizer here
                sampled = output.outputs[0].token_ids
                if stop.is_contained(sampled[max(read - stop.window, 0) :]):
                    await self._llm.abort(request)
                read = len(sampled)
        return output

    async def _replace_or_fail(self, policy: PreTrainedModel | PeftModel, version: int) -> None:
        self._note_action(f"was given the weights of version {version}")
        try:
            await self._replace_weights(policy, version)
        except BaseException:
            self._fail(
                RuntimeError(f"the update to version {version} was not finished; vLLM holds half of the weights")
            )
            raise

    async def _replace_weights(self, policy: PreTrainedModel | PeftModel, version: int) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=True)
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
            torch.cuda.empty_cache()  # what the learner, and the sender, took and let go of
            await self._llm.wake_up([part])

    async def _check_logprobs(self) -> None:
        """Check that logprobs are those of the distribution that is sampled from; record how far off they are."""
        ids = draw_probe_prompt(self._vocabulary, self.max_context)
        start = 0 if self.returns_routed_experts else None
        params = replace(PROBE_PARAMS, routed_experts_start=start)
        completion = await self.generate(ids, params, session="probe")
        self.mismatch = check_logprobs(self._model, ids, completion)
        self.meter = Meter()

    async def _while_alive(self, work: Awaitable[T]) -> T:
        """Run ``work`` in a task of its own as long as vLLM gives a sign of life now and then; return its result.

        The task is cancelled once, not again and again as a scope of anyio does: aborting a request in vLLM takes an
        await.
        """
        assert self._failure is not None
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # marks it as read
        self._calls.add(task)
        try:
            while not task.done():
                if self._failure.done():
                    break
                either: set[asyncio.Future[Any]] = {task, self._failure}
                await asyncio.wait(either, timeout=self._stall_timeout_s / 2, return_when="FIRST_COMPLETED")
                if not task.done() and not self._failure.done():
                    await self._ping()
            if not task.done():
                await self._failure
            return await self._get_result(task)
        finally:
            self._calls.discard(task)
            if not task.done():
                task.cancel()

    async def _get_result(self, task: asyncio.Task[T]) -> T:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return task.result()
        except EngineDeadError:
            await self._on_process_exit(self._processes[0])
            raise self._failure.exception() from None  # type: ignore[union-attr, misc]

    async def _ping(self) -> None:
        ping = asyncio.ensure_future(self._llm.get_weight_version())
        ping.add_done_callback(lambda t: t.cancelled() or t.exception())
        done, _ = await asyncio.wait({ping}, timeout=1.5 * self._stall_timeout_s)
        if not done:
            self._fail(UserError(self._failure_message(f"gave no sign of life for {2 * self._stall_timeout_s:g} s")))
        else:
            self.meter.answers += 1

    def _start_exit_task(self, process: BaseProcess) -> None:
        self._loop.remove_reader(process.sentinel)
        self._exit_task = asyncio.create_task(self._on_process_exit(process))

    async def _on_process_exit(self, process: BaseProcess) -> None:
        for _ in range(50):  # its end is seen before its exit status is
            if process.exitcode is not None:
                break
            await asyncio.sleep(0.02)
        self._fail(UserError(self._failure_message(f"died ({launch.describe_exit(process.exitcode)})")))

    def _failure_message(self, event: str) -> str:
        action = f"It last {self._last_action}, {perf_counter() - self._last_action_at:.0f} s before"
        return (
            f"engine vllm: vLLM's process {event}. {action}; {len(self._calls)} calls were waiting. What it "
            "wrote stands above; VLLM_LOGGING_LEVEL=INFO makes it say more"
        )

    def _fail(self, error: Exception) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    def _note_action(self, action: str) -> None:
        self._last_action, self._last_action_at = action, perf_counter()

    # -- in a thread -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        dtype = next(self._model.parameters()).dtype
        threads = launch.choose_threads(sum(p.numel() for p in self._model.parameters()), self._threads)
        self._folder = tempfile.TemporaryDirectory(prefix="agentrl-vllm-")
        folder = self._folder.name
        launch.write_config(self._model, folder)
        if self._rank:
            launch.write_base_weights(self._model, folder)
        arguments = launch.build_engine_arguments(
            folder,
            dtype,
            max_context=self.max_context,
            capacity=self.capacity,
            cache_bytes=launch.compute_cache_bytes(self._config, dtype, self.capacity * self.max_context),
            backend=launch.choose_transfer_backend(self._model),
            rank=self._rank,
            return_routed_experts=self.returns_routed_experts,
        )
        with launch.use_environment(threads), launch.preserve_process_state(), launch.block_interrupts():
            engine_args = AsyncEngineArgs(
                **arguments,
                **self._share_gpu(),
                skip_tokenizer_init=True,
                trust_remote_code=launch.brings_own_code(self._model),
                load_format="auto" if self._rank else "dummy",
                use_tqdm_on_load=False,
                disable_log_stats=True,
            )
            self._llm = AsyncLLM.from_engine_args(engine_args)
        if self._rank:
            from vllm.lora.request import LoRARequest

            self._lora_request = LoRARequest(lora_sender.ADAPTER_NAME, lora_sender.ADAPTER_SLOT, "sent by the trainer")
        manager = self._llm.engine_core.resources.engine_manager
        self._processes = list(manager.processes) if manager is not None else []

    def _share_gpu(self) -> dict[str, object]:
        """Build the arguments of a vLLM on the learner's GPU."""
        if not self._shares_gpu:
            return {}
        share = 0.5 if self.gpu_share is None else self.gpu_share.share
        return {"enable_sleep_mode": True, "gpu_memory_utilization": share}

    def _end(self, llm: AsyncLLM) -> None:
        llm.shutdown(timeout=0)  # there is nothing to be finished
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(CLOSE_S)


class _EngineClient:
    """The `TransferClient` of an engine in this process: calls from the sender's thread into the event loop."""

    def __init__(self, engine: VLLMEngine) -> None:
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._call("init_weight_transfer_engine", WeightTransferInitRequest(init_info=init_info))

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: object) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._call("update_weights", WeightTransferUpdateRequest(update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", weight_version)

    def receive_adapter(self, message: str) -> list[str]:
        answers: list[str] = self._call("collective_rpc", "receive_adapter", None, (message,))
        return answers

    def _call(self, name: str, *arguments: object) -> Any:
        engine = self._engine
        call = partial(getattr(engine._llm, name), *arguments)
        return asyncio.run_coroutine_threadsafe(_call_while_alive(engine, call), engine._loop).result()


async def _call_while_alive(engine: VLLMEngine, call: Callable[[], Awaitable[Any]]) -> Any:
    """Await a call, or raise the engine's failure: a thread that waits for an answer cannot be cancelled."""
    task = asyncio.ensure_future(call())
    assert engine._failure is not None
    await asyncio.wait({task, engine._failure}, return_when="FIRST_COMPLETED")
    if task.done():
        return task.result()
    task.cancel()
    return await engine._failure


def _innermost_message(error: BaseException) -> str:
    """Return the first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
