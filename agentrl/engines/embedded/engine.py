"""The embedded engine: continuous batching over any transformers causal LM, on CPU or CUDA, with nothing else needed.

There is no background task. Of the callers that wait for their tokens one drives: it has the passes made, in a thread,
so that tools and environments go on meanwhile, until its own turn is sampled; then the next one drives. Hence nothing
has to be started, no error is lost, and a caller that is cancelled takes nobody with it.

The event loop only adds requests and sets flags. Everything else belongs to the thread that makes the passes: between
two of them rows leave and join. What was computed for a session is kept between its turns, outside the batch; the
prompt that the members of a group share is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from time import perf_counter
from typing import Any, Self

import anyio
import torch
from anyio import to_thread
from torch import Tensor

from agentrl.engine import Meter
from agentrl.engines.batch import Batch, Row
from agentrl.engines.kv import Kept, Plan
from agentrl.engines.sampling import sample
from agentrl.engines.view import View
from agentrl.errors import UserError
from agentrl.learner.logprobs import causal_lm
from agentrl.types import Completion, SamplingParams

SLICE_S = 0.02  # passes are made for that long before the event loop is asked again
SMALL = 20_000_000  # parameters; below it a second thread on the CPU mostly waits for the first


class TransformersEngine:
    """Samples from a transformers model. Can be used as an async context manager, which closes it.

    Args:
        model: any causal LM of transformers that uses its attention interface. Its parameters are shared, not
            copied (but for the inputs of attention, where the pass is fused): a learner that changed them must
            call ``update_weights`` before more is sampled.
        capacity: rows sampled at the same time.
        max_context: positions a row may have; the model's own limit by default.
        prefill_tokens: rows join until a pass holds that many tokens, padding included; longer prompts go in parts.
        keep_bytes: keys and values kept for sessions that are not being sampled; the oldest go first.
        threads: threads inside an operation; by default 1 for a small model on the CPU, otherwise torch's setting.
        snapshot: sample from a copy of the weights, taken now and by ``update_weights``, so that a learner may
            change its own at any time.
    """

    def __init__(
        self,
        model: Any,
        *,
        capacity: int = 128,
        max_context: int | None = None,
        prefill_tokens: int = 4096,
        keep_bytes: int = 2 << 30,
        threads: int | None = None,
        snapshot: bool = False,
    ) -> None:
        model = causal_lm(model)
        small = model.device.type == "cpu" and sum(p.numel() for p in model.parameters()) < SMALL
        self._threads = threads or (1 if small else None)
        with self._intra_op():
            self._view = View(model, snapshot=snapshot)
        self._batch = Batch(self._view.new_cache(), Kept(keep_bytes), capacity, prefill_tokens)
        self.max_context = min(max_context or self._view.max_context, self._view.max_context)
        self.version, self.meter = 0, Meter()
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._callers: dict[int, Row] = {}  # the event loop's own: who has not got its tokens yet
        self._driver: Row | None = None
        self._failed: Exception | None = None
        self._turn = anyio.Lock()  # fair: an update of the weights gets its turn between two slices
        self._exclusive = Lock()  # held by the thread: asyncio can cancel its caller while it works
        self._limiter = anyio.CapacityLimiter(2)  # our own: slow tools may fill the one all threads share

    @property
    def capacity(self) -> int:
        return self._batch.capacity

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Sample one turn. Raises UserError where the tokens do not fit."""
        self._check(token_ids, params)
        row = Row(list(token_ids), params, session, len(token_ids))
        self._callers[id(row)] = row
        self._batch.waiting.append(row)
        try:
            while row.stop_reason is None:
                if self._failed is not None:
                    raise self._failed
                if self._driver is None:
                    self._driver = row
                if self._driver is row:
                    await self._drive()
                else:
                    await row.wake.wait()
        finally:
            row.cancelled = row.stop_reason is None
            del self._callers[id(row)]
            if self._driver is row:
                self._driver = next((r for r in self._callers.values() if not r.over), None)
                self._wake()
        return row.completion()

    def end_session(self, session: str) -> None:
        self._batch.kept.forget(session)

    async def update_weights(self, policy: Any, version: int) -> None:
        """Forget what was computed with the old weights; rows that are being sampled go on with the new ones."""
        async with self._turn:
            await to_thread.run_sync(self._update, causal_lm(policy), version, limiter=self._limiter)

    async def close(self) -> None:
        """Waiting calls raise, and so does every later one."""
        self._fail(RuntimeError("the engine is closed"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # -- in the event loop -----------------------------------------------------------------------------------------

    def _check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        if not token_ids or params.max_tokens < 1:
            raise UserError("there must be a token to continue, and one to sample")
        if len(token_ids) + params.max_tokens > self.max_context:
            raise UserError(
                f"{len(token_ids)} tokens of context and {params.max_tokens} to sample do not fit "
                f"in {self.max_context} positions"
            )
        if min(token_ids) < 0 or max(token_ids) >= self._vocabulary:
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
        """Whoever is finished, and whoever is to drive; everybody, if the engine failed."""
        for row in self._callers.values():
            if row.over or row is self._driver or self._failed is not None:
                row.wake.set()

    def _fail(self, error: Exception) -> None:
        self._failed = self._failed or error
        self._batch.kept.clear()
        self._wake()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Make passes until a row is finished, nothing is left to do, or the time slice is over."""
        with self._exclusive, self._intra_op(), torch.inference_mode():
            begun = perf_counter()
            while self._failed is None:
                finished = self._batch.leave()
                self.meter.reused += self._batch.join()
                if finished or not self._batch.rows or perf_counter() - begun > SLICE_S:
                    break
                self.meter.pass_since = perf_counter()
                self._pass()
                self.meter.pass_since = None

    def _pass(self) -> None:
        """One more token for every row."""
        rows, part = self._batch.rows, self._batch.prefill_tokens
        for slot, row in enumerate(rows):
            while row.fresh > part:  # a long prompt, alone, in parts
                self._forward([row.ids[row.cached : row.cached + part]], [row.cached], first=slot)
                row.cached += part
        states = self._forward([r.ids[r.cached :] for r in rows], [r.cached for r in rows])
        tokens, logprobs = sample(self._view.head(states), **self._sampling(rows))
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.take(token, logprob, self.version)
        self.meter.sampled += len(rows)

    def _forward(self, new: list[list[int]], cached: list[int], first: int = 0) -> Tensor:
        """The states that continue the rows, (rows, width)."""
        plan = Plan(self._batch.cache, new, cached, first)
        states = self._view(plan)
        self.meter.passes += 1
        self.meter.prefilled += sum(n for tokens in new if (n := len(tokens)) > 1)
        return states if plan.last is None else states[plan.last]

    def _sampling(self, rows: list[Row]) -> dict[str, Tensor]:
        params = [r.params for r in rows]
        columns = {"uniform": [r.random.random() for r in rows]}
        if any(p.temperature != 1.0 for p in params):
            columns["temperature"] = [p.temperature for p in params]
        if any(p.top_p < 1.0 or p.top_k for p in params):
            columns |= {"top_p": [p.top_p for p in params], "top_k": [p.top_k for p in params]}
        table = torch.tensor(list(columns.values()), dtype=torch.float64).to(self._batch.cache.device)
        return {
            name: values if name == "uniform" else values.float() for name, values in zip(columns, table, strict=True)
        }

    def _update(self, model: Any, version: int) -> None:
        with self._exclusive, self._intra_op():
            self._batch.start_again()
            if self._view.update(model):
                self._batch.cache = self._view.new_cache()
            self.version = version

    @contextmanager
    def _intra_op(self) -> Iterator[None]:
        before = torch.get_num_threads()
        if self._threads in (None, before):
            yield
            return
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
