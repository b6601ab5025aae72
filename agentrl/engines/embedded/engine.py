"""The embedded engine: continuous batching over any transformers causal LM, on CPU or CUDA, with nothing else needed.

There is no background task. One of the callers that wait for their tokens drives: it runs the passes, in a thread, so
that tools and environments go on meanwhile, until its own turn is sampled. Then the next one drives. So nothing has to
be started, no error is lost, and a cancelled caller cancels no other.

The event loop only adds requests and sets flags. Everything else belongs to the thread that makes the passes: between
two of them rows leave and join. A session's keys and values are kept between its turns, outside the batch. The prompt
that the samples of a group share is computed once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Self

import anyio
import torch
from anyio import to_thread
from torch import Tensor

from agentrl.engines.embedded.batch import NEUTRAL, Request, RowBatch, mark_allowed, mark_seen
from agentrl.engines.embedded.model_view import InferenceModel
from agentrl.engines.embedded.plain_view import PlainModel
from agentrl.engines.embedded.router_log import RouterRecorder
from agentrl.engines.embedded.sampling import sample_tokens
from agentrl.errors import UserError
from agentrl.models.kept_tokens import encode_kept
from agentrl.models.lm_head import NotProven, unwrap_model
from agentrl.rollout.engine_protocol import Meter
from agentrl.rollout.token_context import find_bounds
from agentrl.runtime.memory import return_freed_memory
from agentrl.types import Completion, SamplingParams

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

SLICE_S = 0.02  # passes are made for that long before the event loop is asked again
SMALL = 20_000_000  # parameters; below it a second thread on the CPU mostly waits for the first


class TransformersEngine:
    """Samples from a transformers model. Can be used as an async context manager, which closes it.

    Args:
        model: any causal LM of transformers. Its parameters are shared, and where the pass is fused its matrices are
            copied in the order in which they are multiplied fastest: a learner that changed them must call
            ``update_weights`` before more is sampled.
        capacity: rows sampled at the same time.
        max_context: positions a row may have; the model's own limit by default.
        prefill_tokens: rows join until a pass holds that many tokens, padding included; longer prompts go in parts.
        keep_bytes: keys and values kept for sessions that are not being sampled; the oldest go first.
        threads: threads inside an operation; by default 1 for a small model on the CPU, otherwise torch's setting.
        snapshot: sample from a copy of the weights, taken now and by ``update_weights``, so that a learner may
            change its own at any time.
        dtype: of the matrix products, and so of the copies of the matrices; by default that of the model's weights.
        return_routed_experts: record which experts the routers of a mixture of experts choose, and return them.
    """

    reports_kept = True
    takes_grammars = True

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        capacity: int = 128,
        max_context: int | None = None,
        prefill_tokens: int = 4096,
        keep_bytes: int = 2 << 30,
        threads: int | None = None,
        snapshot: bool = False,
        dtype: torch.dtype | None = None,
        return_routed_experts: bool = False,
    ) -> None:
        model = unwrap_model(model)
        self.returns_routed_experts = return_routed_experts
        small = model.device.type == "cpu" and sum(p.numel() for p in model.parameters()) < SMALL
        self._threads, self._dtype = threads or (1 if small else None), dtype
        self._limits = capacity, prefill_tokens, keep_bytes
        with self._use_threads():
            self._model = _open_model(model, snapshot=snapshot, dtype=dtype)
        self._batch: RowBatch = self._new_batch()
        self.max_context = min(max_context or self._model.max_context, self._model.max_context)
        self.version, self.meter = 0, Meter()
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._callers: dict[int, Request] = {}  # the event loop's own: requests that have not been returned yet
        self._driver: Request | None = None
        self._failure: Exception | None = None
        self._turn = anyio.Lock()  # fair: an update of the weights takes its turn between two slices
        self._exclusive = Lock()  # held by the thread: asyncio can cancel its caller while it works
        self._limiter = anyio.CapacityLimiter(2)  # our own: slow tools may fill the one all threads share

    @property
    def capacity(self) -> int:
        return self._batch.capacity

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Sample one turn.

        Raises:
            UserError: the tokens do not fit.
        """
        self._check_request(token_ids, params)
        row = Request(list(token_ids), params, session, len(token_ids))
        self._callers[id(row)] = row
        self._batch.waiting.append(row)
        try:
            while row.stop_reason is None:
                if self._failure is not None:
                    raise self._failure
                if self._driver is None:
                    self._driver = row
                if self._driver is row:
                    await self._drive()
                else:
                    await row.wake.wait()
        except BaseException:
            row.cancelled = True  # also where it is sampled to its end: nobody ends its session after this
            raise
        finally:
            del self._callers[id(row)]
            if self._driver is row:
                self._driver = next((r for r in self._callers.values() if not r.is_done), None)
                self._wake()
        return row.completion()

    def end_session(self, session: str) -> None:
        self._batch.end_session(session)

    async def update_weights(self, policy: PreTrainedModel | PeftModel, version: int) -> None:
        """Forget what was computed with the old weights; rows that are being sampled go on with the new ones."""
        async with self._turn:
            await to_thread.run_sync(self._update, unwrap_model(policy), version, limiter=self._limiter)

    async def sleep(self) -> None:
        """Give memory back while the learner learns: keys, values, packed matrices. Rows that wait begin anew."""
        async with self._turn:
            await to_thread.run_sync(self._release, limiter=self._limiter)

    async def close(self) -> None:
        """Close the engine: waiting calls raise, and so does every later one."""
        self._fail(RuntimeError("the engine is closed"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # -- in the event loop -----------------------------------------------------------------------------------------

    def _check_request(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        if not token_ids or params.max_tokens < 1:
            raise UserError("there must be a token to continue, and one to sample")
        if len(token_ids) + params.max_tokens > self.max_context:
            raise UserError(
                f"{len(token_ids)} tokens of context and {params.max_tokens} to sample do not fit "
                f"in {self.max_context} positions"
            )
        if params.routed_experts_start is not None and not self.returns_routed_experts:
            raise UserError("routed experts are asked for, and this engine was made without return_routed_experts")
        lowest, highest = find_bounds(token_ids)
        if lowest < 0 or highest >= self._vocabulary:
            wrong = next(t for t in token_ids if not 0 <= t < self._vocabulary)
            raise UserError(f"token id {wrong} is outside the model's vocabulary of {self._vocabulary}")

    async def _drive(self) -> None:
        try:
            async with self._turn:
                await to_thread.run_sync(self._work, limiter=self._limiter)
        except Exception as error:  # for every caller, not only for the one that drives
            self._fail(error)
        self._wake()

    def _wake(self) -> None:
        """Wake the callers that are done, and the one that drives; all of them, if the engine failed."""
        for row in self._callers.values():
            if row.is_done or row is self._driver or self._failure is not None:
                row.wake.set()

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._batch.clear_sessions()
        self._wake()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _new_batch(self) -> RowBatch:
        """Make an empty batch of the model, whose routers are recorded where that is wanted."""
        batch: RowBatch = self._model.new_batch(*self._limits)
        if self.returns_routed_experts:
            if isinstance(self._model, PlainModel) and self._model.way is None:
                raise UserError(
                    f"learner.router_replay: {type(self._model.model).__name__} is sampled from {self._model.cost}, "
                    "and what its routers choose is not recorded; leave it out"
                )
            batch.recorder = RouterRecorder(self._model.model)
        return batch

    def _work(self) -> None:
        """Run passes until a row is finished, nothing is left to do, or the time slice is over."""
        with self._exclusive, self._use_threads(), torch.inference_mode():
            start = perf_counter()
            while self._failure is None:
                finished = self._batch.remove_finished()
                self.meter.reused += self._batch.admit_waiting()
                if finished or not self._batch.rows or perf_counter() - start > SLICE_S:
                    break
                self.meter.pass_since = perf_counter()
                self._run_pass()
                self.meter.pass_since = None

    def _run_pass(self) -> None:
        """Sample one more token for every row."""
        rows = self._batch.rows
        logits = self._batch.compute_logits(self.meter)
        sampled = sample_tokens(logits, **self._tabulate_sampling(rows, logits))
        drawn = [row for row in rows if row.kept is not None]
        if drawn and sampled.kept is not None:
            kept = sampled.kept if len(drawn) == len(rows) else sampled.kept[[r.kept is not None for r in rows]]
            for row, one in zip(drawn, encode_kept(kept), strict=True):
                row.keep(one)
        for row, token, logprob in zip(rows, sampled.tokens.tolist(), sampled.logprobs.tolist(), strict=True):
            row.append(token, logprob, self.version)
        self.meter.sampled += len(rows)

    def _tabulate_sampling(self, rows: list[Request], logits: Tensor) -> dict[str, Tensor]:
        """Make the arguments of `sample_tokens` from the rows' parameters: (rows,) each, and masks as the logits."""
        device = logits.device
        arguments = {"uniform": torch.tensor([r.random.random() for r in rows], dtype=torch.float64).to(device)}
        for name in set().union(*(r.changed for r in rows)):
            arguments[name] = torch.tensor([float(r.changed.get(name, NEUTRAL[name])) for r in rows]).to(device)
        if "top_k" in arguments:
            arguments["top_k"] = arguments["top_k"].long()
        if "repetition_penalty" in arguments:
            arguments["seen"] = mark_seen(rows, logits)
        if any(row.grammar is not None for row in rows):
            arguments["allowed"] = mark_allowed(rows, logits)
        return arguments

    def _release(self) -> None:
        with self._exclusive:
            self._batch.release()
            return_freed_memory()

    def _update(self, model: PreTrainedModel, version: int) -> None:
        with self._exclusive, self._use_threads():
            self._batch.restart()
            if not self._model.update(model):
                waiting = self._batch.waiting
                self._model = _open_model(model, snapshot=False, dtype=self._dtype)
                self._batch = self._new_batch()
                self._batch.waiting = waiting
            self.version = version

    @contextmanager
    def _use_threads(self) -> Iterator[None]:
        """Set torch's threads inside an operation until the block ends."""
        before = torch.get_num_threads()
        if self._threads in (None, before):
            yield
            return
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _open_model(model: PreTrainedModel, *, snapshot: bool, dtype: torch.dtype | None) -> InferenceModel | PlainModel:
    """Choose the way through a model: the engine's own attention where it is proven, or else the model's own cache.

    Raises:
        UserError: the model cannot be sampled from at all.
    """
    name = type(model).__name__
    try:
        return InferenceModel(model, snapshot=snapshot, dtype=dtype)
    except NotProven as reason:
        why = reason
    try:
        plain = PlainModel(model, snapshot=snapshot, dtype=dtype)
    except NotProven as reason:
        raise UserError(
            f"the embedded engine cannot run {name}: {reason}. vLLM may: --engine vllm (docs/models.md)"
        ) from None
    warnings.warn(
        f"{name}: the embedded engine goes the plain way, {plain.cost}: {why}. vLLM may be faster: --engine vllm "
        "(docs/models.md)",
        stacklevel=3,
    )
    return plain
