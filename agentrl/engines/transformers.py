"""The embedded engine: continuous batching over any transformers causal LM, on CPU or CUDA, with nothing else needed.

There is no background task. Of the callers that wait for their tokens one drives: it has the passes made, in a thread,
so that tools and environments go on meanwhile, until its own turn is sampled; then the next one drives. Hence nothing
has to be started, no error is lost, and a caller that is cancelled takes nobody with it.

The event loop only adds requests and sets flags. Everything else belongs to the thread that makes the passes: between
two of them rows leave and join. What was computed for a session is kept between its turns, outside the batch;
the prompt that the members of a group share is computed once.
"""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter
from typing import Any, Self

import anyio
import torch
from anyio import to_thread
from torch import Tensor
from transformers import AttentionInterface

from agentrl.engines.fused import FusedForward, can_fuse
from agentrl.engines.kv import ATTENTION, Kept, Plan, SlotCache, attend, following
from agentrl.engines.sampling import sample
from agentrl.errors import UserError
from agentrl.learner.logprobs import causal_lm, output_head
from agentrl.types import Completion, SamplingParams

AttentionInterface.register(ATTENTION, attend)

SLICE_S = 0.02  # passes are made for that long before the event loop is asked again
SMALL = 20_000_000  # parameters; below it a second thread on the CPU mostly waits for the first


@dataclass(eq=False)
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
    wake: anyio.Event = field(default_factory=anyio.Event)  # it is finished, or it drives, or the engine failed

    def __post_init__(self) -> None:
        self.random = random.Random(self.params.seed)

    @property
    def over(self) -> bool:
        return self.cancelled or bool(self.stop_reason)

    def take(self, token: int, logprob: float, version: int) -> None:
        if not math.isfinite(logprob):
            raise FloatingPointError("the policy's logits are not finite: its weights have diverged")
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
    """What the engine has done since it was made."""

    sampled: int = 0  # tokens
    prefilled: int = 0  # tokens of prompts that went through the model
    reused: int = 0  # tokens of prompts that were found in the cache
    passes: int = 0
    busy_s: float = 0.0


class TransformersEngine:
    """Samples from a transformers model. Can be used as an async context manager, which closes it.

    Args:
        model: any causal LM of transformers that uses its attention interface. Its parameters are shared, not
            copied (small Llama-like models: all but the attention's inputs), so a learner that changed them must
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
        self.capacity, self.version, self.meter = capacity, 0, Meter()
        self._prefill_tokens, self._snapshot = prefill_tokens, snapshot
        limit: int = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20
        self.max_context = min(max_context or limit, limit)
        self._vocabulary = int(model.get_input_embeddings().num_embeddings)
        small = sum(p.numel() for p in model.parameters()) < SMALL
        on_cpu = next(model.parameters()).device.type == "cpu"
        self._threads = threads or (1 if small and on_cpu else None)
        self._active: list[_Row] = []  # row i is in slot i
        self._waiting: deque[_Row] = deque()
        self._callers: dict[int, _Row] = {}  # the event loop's own: who has not got its tokens yet
        self._kept = Kept(keep_bytes)
        self._driver: _Row | None = None
        self._failed: BaseException | None = None
        self._turn = anyio.Lock()  # fair: an update of the weights gets its turn between two slices
        self._exclusive = Lock()  # held by the thread: asyncio can cancel its caller while it works
        with self._intra_op():
            self._adopt(model)

    # -- the engine's contract -------------------------------------------------------------------------------------

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Sample one turn. Raises UserError where the tokens do not fit."""
        self._check(token_ids, params)
        row = _Row(list(token_ids), params, session, len(token_ids))
        self._callers[id(row)] = row
        self._waiting.append(row)
        try:
            while not row.stop_reason:
                if self._failed is not None:
                    raise self._failed
                if self._driver is None:
                    self._driver = row
                if self._driver is row:
                    await self._drive()
                else:
                    await row.wake.wait()
        finally:
            row.cancelled = not row.stop_reason
            del self._callers[id(row)]
            if self._driver is row:
                self._driver = next((r for r in self._callers.values() if not r.over), None)
                self._wake()
        return row.completion()

    def end_session(self, session: str) -> None:
        self._kept.forget(session)

    async def update_weights(self, policy: Any, version: int) -> None:
        """Forget what was computed with the old weights; rows that are being sampled go on with the new ones."""
        async with self._turn:
            await to_thread.run_sync(self._update, policy, version)

    async def close(self) -> None:
        """Waiting calls raise, and so does every later one."""
        self._fail(RuntimeError("the engine is closed"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # -- who drives ------------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        try:
            async with self._turn:
                await to_thread.run_sync(self._work)
        except Exception as error:
            self._fail(error)
        self._wake()

    def _wake(self) -> None:
        """Whoever is finished, and whoever is to drive."""
        for row in self._callers.values():
            if row.over or row is self._driver or self._failed is not None:
                row.wake.set()

    def _fail(self, error: Exception) -> None:
        self._failed = self._failed or error
        self._kept.clear()
        self._wake()

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Make passes until a row is finished, nothing is left to do, or the time slice is over."""
        with self._exclusive, self._intra_op(), torch.inference_mode():
            begun = perf_counter()
            while self._failed is None:
                finished = self._leave()
                self._join()
                if finished or not self._active or perf_counter() - begun > SLICE_S:
                    break
                self._pass()
            self.meter.busy_s += perf_counter() - begun

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

    def _leave(self) -> bool:
        """Rows that are over give up their slot; the last row moves into it. Whether a caller waits for one."""
        over = [slot for slot, row in enumerate(self._active) if row.over]
        finished = False
        for slot in reversed(over):
            row = self._active[slot]
            if not row.cancelled:
                self._kept.keep(row.session, row.ids[: row.cached], self._cache.read(slot, row.cached))
                finished = True
            last = self._active.pop()
            if last is not row:
                self._cache.write(slot, self._cache.read(len(self._active), last.cached))
                self._active[slot] = last
        return finished

    def _join(self) -> None:
        """Waiting rows take the free slots, up to ``prefill_tokens`` of new work in one pass."""
        joining: list[tuple[_Row, Tensor | None]] = []
        later: list[_Row] = []
        computing: set[tuple[int, ...]] = set()
        longest = 0
        while self._waiting and len(self._active) + len(joining) < self.capacity:
            row = self._waiting.popleft()
            if row.over:
                continue
            prompt = tuple(row.ids[: row.prompt_length])
            known = self._known(row)
            if known is None and prompt in computing:
                later.append(row)  # a sibling computes this prompt in this very pass
                continue
            row.cached = known.shape[3] if known is not None else 0
            longest = max(longest, len(row.ids) - row.cached)
            if joining and (len(joining) + 1) * longest > self._prefill_tokens:
                later.append(row)
                break
            computing.add(prompt)
            joining.append((row, known))
        self._waiting.extendleft(reversed(later))
        # attention pads neighbours to the same shape
        for row, known in sorted(joining, key=lambda j: (len(j[0].ids) - j[0].cached, len(j[0].ids))):
            if known is not None:
                self._cache.write(len(self._active), known)
            self._active.append(row)
            self.meter.reused += row.cached

    def _known(self, row: _Row) -> Tensor | None:
        """Keys and values of a prefix of the row: its session's last turn, or a sibling that has the same prompt."""
        if (kept := self._kept.find(row.session)) is not None:
            ids, values = kept
            length = min(_common(ids, row.ids), len(row.ids) - 1)
            return values[:, :, :, :length] if length else None
        shared = row.prompt_length - 1  # one token is left to compute: its state gives the first logits
        prefix = row.ids[:shared]
        for slot, sibling in enumerate(self._active):
            if sibling.cached >= shared > 0 and sibling.ids[:shared] == prefix:
                return self._cache.read(slot, shared)
        for ids, values in self._kept.others():
            if len(ids) >= shared > 0 and ids[:shared] == prefix:
                return values[:, :, :, :shared]
        return None

    def _pass(self) -> None:
        rows = self._active
        for slot, row in enumerate(rows):
            while len(row.ids) - row.cached > self._prefill_tokens:  # a long prompt, alone, in parts
                self._forward([row.ids[row.cached : row.cached + self._prefill_tokens]], [row.cached], first=slot)
                row.cached += self._prefill_tokens
        states = self._forward([r.ids[r.cached :] for r in rows], [r.cached for r in rows])
        tokens, logprobs = sample(self._head(states), **self._sampling(rows))
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.take(token, logprob, self.version)
        self.meter.sampled += len(rows)

    def _forward(self, new: list[list[int]], cached: list[int], first: int = 0) -> Tensor:
        """The states that continue the rows, (rows, width)."""
        plan = Plan(self._cache, new, cached, first)
        states = self._states(plan)
        self.meter.passes += 1
        self.meter.prefilled += sum(n for tokens in new if (n := len(tokens)) > 1)
        return states if plan.last is None else states[plan.last]

    def _sampling(self, rows: list[_Row]) -> dict[str, Tensor]:
        params = [r.params for r in rows]
        columns = {"uniform": [r.random.random() for r in rows]}
        if any(p.temperature != 1.0 for p in params):
            columns["temperature"] = [p.temperature for p in params]
        if any(p.top_p < 1.0 or p.top_k for p in params):
            columns |= {"top_p": [p.top_p for p in params], "top_k": [p.top_k for p in params]}
        table = torch.tensor(list(columns.values()), dtype=torch.float64).to(self._cache.device)
        return {
            name: values if name == "uniform" else values.float() for name, values in zip(columns, table, strict=True)
        }

    # -- weights ---------------------------------------------------------------------------------------------------

    def _update(self, policy: Any, version: int) -> None:
        with self._exclusive, self._intra_op():
            self.version = version
            self._kept.clear()
            for row in reversed(self._active):  # they join again, from their first token
                row.cached = 0
                self._waiting.appendleft(row)
            self._active.clear()
            theirs = list(causal_lm(policy).parameters())
            ours = list(self._model.parameters())
            if self._snapshot:
                with torch.no_grad():
                    for mine, new in zip(ours, theirs, strict=True):
                        mine.copy_(new)
            elif len(ours) != len(theirs) or any(a is not b for a, b in zip(ours, theirs, strict=True)):
                self._adopt(causal_lm(policy))
            if isinstance(self._states, FusedForward):
                self._states.refresh()

    def _adopt(self, model: Any) -> None:
        """Make a view of the model, a forward pass over it, and compare that with the model's own."""
        tensors = {} if self._snapshot else {id(t): t for t in [*model.parameters(), *model.buffers()]}
        self._model = view = copy.deepcopy(model, memo=tensors).eval()
        first = next(view.parameters())
        self._cache = SlotCache(view.config.get_text_config(), first.dtype, first.device)
        self._head = output_head(view)
        ids = torch.randint(self._vocabulary, (2, 12), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            expected = view(input_ids=ids.to(first.device), use_cache=False).logits[[0, 1], [7, 11]]
            view.set_attn_implementation(ATTENTION)
            if view.config.get_text_config()._attn_implementation != ATTENTION:
                raise UserError(
                    f"{type(model).__name__} does not use transformers' attention interface, "
                    "which the embedded engine needs"
                )
            if can_fuse(view):
                self._states: Callable[[Plan], Tensor] = FusedForward(view, self.max_context)
                if self._agrees(ids.tolist(), expected):
                    return
            self._states = self._generic
            if not self._agrees(ids.tolist(), expected):
                raise UserError(f"{type(model).__name__} computes something else in the embedded engine")

    def _agrees(self, ids: list[list[int]], expected: Tensor) -> bool:
        """Two rows in three passes, so that prompts, single tokens and continuations all occur."""
        a, b = ids
        meter, self.meter = self.meter, Meter()
        try:
            self._forward([a[:5], b[:4]], [0, 0])
            self._forward([a[5:6], b[4:10]], [5, 4])
            found = self._head(self._forward([a[6:8], b[10:12]], [6, 10]))
        except NotImplementedError as error:
            raise UserError(f"the embedded engine cannot run {type(self._model).__name__}: {error}") from None
        finally:
            self.meter = meter
        share = 1e-3 if expected.dtype == torch.float32 else 0.1
        return bool((found - expected).float().square().mean().sqrt() <= share * expected.float().std())

    def _generic(self, plan: Plan) -> Tensor:
        with following(plan):
            states: Tensor = self._model.base_model(
                input_ids=plan.ids[None], position_ids=plan.positions[None], use_cache=False
            ).last_hidden_state
        return states[0]

    # -- what a caller may ask -------------------------------------------------------------------------------------

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


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    if b[: len(a)] == a:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
