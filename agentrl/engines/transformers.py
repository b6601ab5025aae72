"""The embedded engine: continuous batching over any transformers causal LM, on CPU or CUDA, with nothing else needed.

One task drives it. Between two forward passes it lets requests join and leave; the pass itself runs in a thread, so
that tools and environments go on meanwhile. What was computed for a session is kept between its turns, outside the
batch; the prompt that the members of a group share is computed once.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Self

import anyio
import torch
from anyio import to_thread
from torch import Tensor
from transformers import AttentionInterface

from agentrl.engines.kv import ATTENTION, Plan, SlotCache, attend, following
from agentrl.engines.sampling import sample
from agentrl.errors import UserError
from agentrl.learner.logprobs import output_head
from agentrl.types import Completion, SamplingParams

AttentionInterface.register(ATTENTION, attend)


@dataclass
class _Row:
    """A request: its tokens so far, and how many of them the cache holds."""

    ids: list[int]
    params: SamplingParams
    session: str
    prompt_length: int
    cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: str = ""
    cancelled: bool = False
    done: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.random = random.Random(self.params.seed)

    @property
    def fresh(self) -> int:
        return len(self.ids) - self.cached

    def take(self, token: int, logprob: float, version: int) -> None:
        self.cached = len(self.ids)
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.params.stop_token_ids:
            self.stop_reason = "stop"
        elif len(self.ids) - self.prompt_length >= self.params.max_tokens:
            self.stop_reason = "length"

    def completion(self) -> Completion:
        sampled = tuple(self.ids[self.prompt_length :])
        reason = "stop" if self.stop_reason == "stop" else "length"
        return Completion(sampled, tuple(self.logprobs), tuple(self.versions), reason)  # type: ignore[arg-type]


@dataclass
class Meter:
    """What the engine has done since it started."""

    sampled: int = 0  # tokens
    prefilled: int = 0  # tokens of prompts that went through the model
    reused: int = 0  # tokens of prompts that were found in the cache
    passes: int = 0
    busy_s: float = 0.0


class TransformersEngine:
    """Samples from a transformers model. Use as an async context manager, which runs its loop.

    Args:
        model: any causal LM of transformers that uses its attention interface. Its parameters are shared, not
            copied: a learner that changes them in place need only call ``update_weights``.
        capacity: rows sampled at the same time.
        max_context: positions a row may have; the model's own limit by default.
        prefill_tokens: prompts join until a pass holds that many tokens.
        keep_bytes: keys and values kept for sessions that are not being sampled; the oldest go first.
    """

    def __init__(
        self,
        model: Any,
        *,
        capacity: int = 128,
        max_context: int | None = None,
        prefill_tokens: int = 4096,
        keep_bytes: int = 2 << 30,
    ) -> None:
        self.capacity = capacity
        limit: int = getattr(model.config, "max_position_embeddings", None) or 1 << 20
        self.max_context = min(max_context or limit, limit)
        self.version = 0
        self.meter = Meter()
        self._prefill_tokens, self._keep_bytes = prefill_tokens, keep_bytes
        self._model = _view(model)
        self._head = output_head(self._model)
        first = next(model.parameters())
        self._device = first.device
        self._cache = SlotCache(model.config.get_text_config(), capacity, first.dtype, first.device)
        self._active: list[_Row] = []  # row i is in slot i
        self._waiting: deque[_Row] = deque()
        self._kept: OrderedDict[str, tuple[list[int], Tensor]] = OrderedDict()
        self._kept_size = 0
        self._arrived = anyio.Event()
        self._failed: BaseException | None = None

    # -- the engine's contract -------------------------------------------------------------------------------------

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Sample one turn. Raises UserError where the tokens do not fit."""
        if not token_ids or len(token_ids) + params.max_tokens > self.max_context:
            raise UserError(
                f"{len(token_ids)} tokens of context and {params.max_tokens} to sample do not fit "
                f"in {self.max_context} positions"
            )
        row = _Row(list(token_ids), params, session, len(token_ids))
        self._waiting.append(row)
        self._arrived.set()
        try:
            await row.done.wait()
        finally:
            row.cancelled = not row.done.is_set()
        if self._failed is not None:
            raise self._failed
        return row.completion()

    def end_session(self, session: str) -> None:
        self._drop(session)

    async def update_weights(self, policy: Any, version: int) -> None:
        """The parameters are shared: what was computed with the old ones is forgotten, running rows too."""
        self.version = version
        self._kept.clear()
        self._kept_size = 0
        for row in self._active:
            row.cached = 0

    async def close(self) -> None:
        self._tasks.cancel_scope.cancel()

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run)
        return self

    async def __aexit__(self, *exception: Any) -> bool | None:
        self._tasks.cancel_scope.cancel()
        return await self._tasks.__aexit__(*exception)

    # -- the loop --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                self._leave()
                self._join()
                if not self._active:
                    self._arrived = anyio.Event()
                    await self._arrived.wait()
                    await anyio.sleep(0)  # those that arrive together start together
                    continue
                begun = perf_counter()
                tokens, logprobs = await to_thread.run_sync(self._forward)
                self.meter.busy_s += perf_counter() - begun
                for row, token, logprob in zip(self._active, tokens, logprobs, strict=True):
                    row.take(token, logprob, self.version)
        except BaseException as error:
            self._failed = error if isinstance(error, Exception) else RuntimeError("the engine was closed")
            for row in [*self._active, *self._waiting]:
                row.done.set()
            if not isinstance(error, Exception):
                raise

    def _leave(self) -> None:
        """Rows that are finished or cancelled give up their slot; the last row moves into it."""
        for slot in reversed(range(len(self._active))):
            row = self._active[slot]
            if not (row.stop_reason or row.cancelled):
                continue
            if not row.cancelled:
                self._keep(row.session, row.ids[: row.cached], slot)
            row.done.set()
            last = self._active.pop()
            if last is not row:
                self._cache.move(len(self._active), slot, last.cached)
                self._active[slot] = last

    def _join(self) -> None:
        """Waiting rows take the free slots, up to ``prefill_tokens`` of new work in one pass."""
        room, later, computing = self._prefill_tokens, deque[_Row](), set[tuple[int, ...]]()
        while self._waiting and len(self._active) < self.capacity and room > 0:
            row = self._waiting.popleft()
            if row.cancelled:
                continue
            self._restore(row, len(self._active), computing)
            if row.cached == 0 and tuple(row.ids) in computing:
                later.append(row)  # a sibling computes this prompt in this very pass
                continue
            computing.add(tuple(row.ids))
            room -= row.fresh
            self._active.append(row)
        self._waiting.extendleft(reversed(later))

    def _forward(self) -> tuple[list[int], list[float]]:
        rows = self._active
        plan = Plan(self._cache, [r.fresh for r in rows], [r.cached for r in rows])
        ids = torch.tensor([t for r in rows for t in r.ids[r.cached :]], device=self._device)
        with torch.inference_mode(), following(plan):
            hidden = self._model.base_model(
                input_ids=ids[None], position_ids=plan.positions[None], use_cache=False
            ).last_hidden_state
            logits = self._head(hidden[0, plan.last])
            tokens, logprobs = sample(logits, **self._sampling(rows))
        self.meter.passes += 1
        self.meter.sampled += len(rows)
        self.meter.prefilled += len(ids) - plan.decoding
        return tokens.tolist(), logprobs.tolist()

    def _sampling(self, rows: list[_Row]) -> dict[str, Tensor | None]:
        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        params = [r.params for r in rows]
        cut = any(p.top_p < 1.0 or p.top_k for p in params)
        return {
            "temperature": column([p.temperature for p in params], torch.float32),
            "uniform": column([r.random.random() for r in rows], torch.float64),
            "top_p": column([p.top_p for p in params], torch.float32) if cut else None,
            "top_k": column([p.top_k for p in params], torch.int64) if cut else None,
        }

    # -- what is kept between turns ----------------------------------------------------------------------------------

    def _keep(self, session: str, ids: list[int], slot: int) -> None:
        self._drop(session)
        values = self._cache.read(slot, len(ids))
        self._kept[session] = (ids, values)
        self._kept_size += values.nbytes
        while self._kept_size > self._keep_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, session: str) -> None:
        if (kept := self._kept.pop(session, None)) is not None:
            self._kept_size -= kept[1].nbytes

    def _restore(self, row: _Row, slot: int, computing: set[tuple[int, ...]]) -> None:
        """Find what is known of the row: its session's last turn, or a sibling that has the same prompt."""
        ids, values = self._kept.get(row.session, ([], None))
        if values is not None and row.ids[: len(ids)] == ids and len(ids) < len(row.ids):
            self._cache.write(slot, values)
            row.cached = len(ids)
        else:
            for other, sibling in enumerate(self._active):
                shared = row.prompt_length - 1
                if sibling.cached > shared and sibling.ids[: shared + 1] == row.ids:
                    self._cache.move(other, slot, shared)
                    row.cached = shared
                    break
        self.meter.reused += row.cached


def _view(model: Any) -> Any:
    """A second module tree over the same parameters, with our attention, in inference mode."""
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    view = copy.deepcopy(model, memo=tensors).eval()
    view.set_attn_implementation(ATTENTION)
    if view.config._attn_implementation != ATTENTION:
        raise UserError(
            f"{type(model).__name__} does not use transformers' attention interface, which the embedded engine needs"
        )
    return view
