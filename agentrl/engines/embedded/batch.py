"""Continuous batching: requests, and the batch that they join and leave. Row i of it is in slot i of the cache."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import anyio
import numpy as np
import torch
from torch import Tensor

from agentrl.engines.embedded.kv_cache import ForwardBatch, SessionCache, SlotCache
from agentrl.types import Completion, KeptTokens, SamplingParams

if TYPE_CHECKING:
    from agentrl.engines.embedded.model_view import InferenceModel
    from agentrl.engines.embedded.router_log import RouterLog, RouterRecorder
    from agentrl.rollout.engine_protocol import Meter

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(eq=False)
class Request:
    """A turn to be sampled: its tokens so far, and how many of them the cache holds."""

    ids: list[int]
    params: SamplingParams
    session: str
    prompt_length: int
    cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None
    cancelled: bool = False
    routed: RouterLog | None = None  # of an engine that records what its routers choose
    wake: anyio.Event = field(default_factory=anyio.Event)  # the request is done or drives, or the engine failed

    def __post_init__(self) -> None:
        self.random = random.Random(self.params.seed)
        # what differs from plain sampling, by the names of `sample_tokens`: nothing, as a rule
        self.changed = {n: v for n, v in ((n, getattr(self.params, n)) for n in NEUTRAL) if v != NEUTRAL[n]}
        self.kept: list[bytes] | None = [] if self.params.truncates else None  # the set of each sampled token
        self.grammar = self.params.grammar.start() if self.params.grammar is not None else None

    @property
    def is_done(self) -> bool:
        """Return True for a request that is finished or cancelled."""
        return self.cancelled or self.stop_reason is not None

    @property
    def uncached(self) -> int:
        """Count the tokens that are not yet in the cache."""
        return len(self.ids) - self.cached

    def keep(self, kept: bytes) -> None:
        """Append the set that the next token is drawn among."""
        assert self.kept is not None
        self.kept.append(kept)

    def append(self, token: int, logprob: float, version: int) -> None:
        """Append a sampled token, and stop where it is a stop token or the last one asked for."""
        if not math.isfinite(logprob):
            raise FloatingPointError("the policy's logits are not finite: its weights have diverged")
        self.cached = len(self.ids)
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.grammar is not None:
            self.grammar.accept(token)
        stop = self.params.stop
        if token in self.params.stop_token_ids or (stop and stop.is_completed(self.ids, self.prompt_length)):
            self.stop_reason = "stop"
        elif len(self.logprobs) >= self.params.max_tokens:
            self.stop_reason = "length"

    def completion(self) -> Completion:
        """Return what was sampled."""
        assert self.stop_reason is not None
        sampled = tuple(self.ids[self.prompt_length :])
        kept = None if self.kept is None else KeptTokens.collect(self.kept)
        routed, start = None, self.params.routed_experts_start
        if self.routed is not None and start is not None:
            routed = self.routed.read(start, len(self.ids) - 1)  # the last token passes in the next turn
        return Completion(sampled, tuple(self.logprobs), tuple(self.versions), self.stop_reason, kept, routed)


class KeptRow(NamedTuple):
    """The keys and values of a session, or of a part of it, and the experts that its tokens went to."""

    values: Tensor
    routed: RouterLog | None


def mark_seen(rows: Sequence[Request], logits: Tensor) -> Tensor:
    """Mark the tokens of each row's context, as wide as the logits."""
    seen = torch.zeros_like(logits, dtype=torch.bool)
    slots = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(row.ids) for row in rows]))
    tokens = torch.tensor(list(chain.from_iterable(row.ids for row in rows)))
    has_logit = tokens < logits.shape[1]  # some models have more embeddings
    seen[slots[has_logit].to(seen.device), tokens[has_logit].to(seen.device)] = True
    return seen


def mark_allowed(rows: Sequence[Request], logits: Tensor) -> Tensor:
    """Mark the tokens that each row's grammar allows next, as wide as the logits; all where a row has none."""
    allowed = np.ones(logits.shape, dtype=bool)
    for slot, row in enumerate(rows):
        if row.grammar is not None:
            bits = np.frombuffer(row.grammar.compute_allowed(), dtype=np.uint8)
            one = np.unpackbits(bits, bitorder="little")[: logits.shape[1]]
            allowed[slot, : len(one)], allowed[slot, len(one) :] = one, False
    return torch.from_numpy(allowed).to(logits.device)


class RowBatch(Protocol):
    """Running and waiting requests, and what was computed of them. All but ``waiting`` is the engine's thread's."""

    sessions: SessionCache[Any]
    capacity: int
    waiting: deque[Request]
    recorder: RouterRecorder | None

    @property
    def rows(self) -> list[Request]:
        """Return the running rows; the order may change between two passes."""
        ...

    def remove_finished(self) -> bool:
        """Remove rows that are done. Return True if a caller waits for one."""
        ...

    def admit_waiting(self) -> int:
        """Let waiting rows join; return how many of their tokens need not be computed."""
        ...

    def compute_logits(self, meter: Meter) -> Tensor:
        """Compute the logits that continue each row, (rows, vocabulary)."""
        ...

    def restart(self) -> None:
        """Forget all that was computed. The rows wait, to be computed again from their first token."""
        ...

    def release(self) -> None:
        """Restart, and give the memory of what was computed back."""
        ...

    def end_session(self, session: str) -> None:
        """Forget what is kept of a session."""
        ...

    def clear_sessions(self) -> None:
        """Forget what is kept of all sessions."""
        ...


@dataclass
class ContinuousBatch:
    """A `RowBatch` whose rows stand in the slots of one cache.

    ``sessions`` holds keys and values of sessions that are not running.
    """

    model: InferenceModel
    cache: SlotCache
    sessions: SessionCache[KeptRow]
    capacity: int
    prefill_tokens: int
    rows: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    recorder: RouterRecorder | None = None

    def remove_finished(self) -> bool:
        """Remove rows that are done, moving the last row into each hole. Return True if a caller waits for one."""
        finished = False
        for slot in reversed([slot for slot, row in enumerate(self.rows) if row.is_done]):
            row = self.rows[slot]
            if not row.cancelled:
                values = self.cache.read(slot, row.cached).clone()
                size = values.nbytes + (row.routed.nbytes if row.routed is not None else 0)
                self.sessions.put(row.session, row.ids[: row.cached], KeptRow(values, row.routed), size)
                finished = True
            last = self.rows.pop()
            if last is not row:
                self.cache.write(slot, self.cache.read(len(self.rows), last.cached))
                self.rows[slot] = last
        return finished

    def admit_waiting(self) -> int:
        """Give the free slots to waiting rows; return how many of their tokens were in the cache.

        One pass takes up to ``prefill_tokens`` of new work, padding included; a longer prompt comes alone. A row for
        which the cache has no room waits until others have left.
        """
        joining: list[tuple[Request, KeptRow | None]] = []
        later: list[Request] = []
        computing: set[tuple[int, ...]] = set()
        longest = 0
        while self.waiting and len(self.rows) + len(joining) < self.capacity:
            row = self.waiting.popleft()
            if row.is_done:
                continue
            prefix, prompt = self._find_prefix(row), tuple(row.ids[: row.prompt_length])
            if prefix is None and prompt in computing:
                later.append(row)  # a sibling computes this prompt in this very pass
                continue
            row.cached = 0 if prefix is None else prefix.values.shape[3]
            longest = max(longest, row.uncached)
            if not self._has_room([*self.rows, *(r for r, _ in joining), row]):
                later.append(row)
                break
            if joining and (len(joining) + 1) * longest > self.prefill_tokens:
                later.append(row)
                break
            if len(prompt) > 1:  # of a single token nothing can be shared
                computing.add(prompt)
            joining.append((row, prefix))
        self.waiting.extendleft(reversed(later))
        self._add_rows(joining)
        return sum(row.cached for row, _ in joining)

    def _has_room(self, rows: list[Request]) -> bool:
        """Return True if the cache has room for rows up to their last token; for a single one it always has."""
        positions = max(row.prompt_length + row.params.max_tokens for row in rows)
        return len(rows) == 1 or self.cache.fits(len(rows), positions)

    def _add_rows(self, joining: list[tuple[Request, KeptRow | None]]) -> None:
        for row, prefix in sorted(joining, key=lambda j: (j[0].uncached, j[0].cached)):  # neighbours are padded alike
            if prefix is not None:
                self.cache.write(len(self.rows), prefix.values)
            begin_log(self.recorder, row, None if prefix is None else prefix.routed)
            self.rows.append(row)

    def compute_logits(self, meter: Meter) -> Tensor:
        rows, part = self.rows, self.prefill_tokens
        self.cache.reserve(len(rows), max(len(row.ids) for row in rows))  # for all, before a part of one is computed
        for slot, row in enumerate(rows):
            while row.uncached > part:  # a long prompt, alone, in parts
                self._forward([row.ids[row.cached : row.cached + part]], [row.cached], meter, first=slot)
                row.cached += part
        return self.model.lm_head(self._forward([r.ids[r.cached :] for r in rows], [r.cached for r in rows], meter))

    def _forward(self, new: list[list[int]], cached: list[int], meter: Meter, first: int = 0) -> Tensor:
        """Compute the states that continue the rows, (rows, width)."""
        batch = ForwardBatch(self.cache, new, cached, first)
        states = self.model(batch)
        meter.passes += 1
        meter.prefilled += sum(n for tokens in new if (n := len(tokens)) > 1)
        if self.recorder is not None:
            record_experts(self.recorder, self.rows[first : first + len(new)], list(map(len, new)))
        return states if batch.last is None else states[batch.last]

    def restart(self) -> None:
        self.clear_sessions()
        restart_logs(self.rows)
        self.waiting.extendleft(reversed(self.rows))
        self.rows.clear()

    def release(self) -> None:
        self.restart()
        self.cache.release()
        self.model.release()

    def end_session(self, session: str) -> None:
        self.sessions.remove(session)

    def clear_sessions(self) -> None:
        self.sessions.clear()

    def _find_prefix(self, row: Request) -> KeptRow | None:
        """Find keys and values of a prefix of the row: of its session's last turn, or of a row with the same prompt.

        One token is always left to compute: its state gives the next logits.
        """
        own, length = self.sessions.get(row.session), 0
        if own is not None:
            length = min(_common_prefix_length(own[0], row.ids), len(row.ids) - 1)
        shared = row.prompt_length - 1
        if length < shared and (other := self._find_sibling(row.ids[:shared])) is not None:
            return other
        return _cut(own[1], length) if own is not None and length else None

    def _find_sibling(self, prefix: list[int]) -> KeptRow | None:
        """Find keys and values of those tokens in another row or session that begins with them."""
        length = len(prefix)
        for slot, row in enumerate(self.rows):
            if row.cached >= length and row.ids[:length] == prefix:
                return KeptRow(self.cache.read(slot, length), row.routed)
        for ids, kept in self.sessions.values():
            if ids[:length] == prefix:
                return _cut(kept, length)
        return None


def _cut(kept: KeptRow, length: int) -> KeptRow:
    return kept._replace(values=kept.values[:, :, :, :length])


def begin_log(recorder: RouterRecorder | None, row: Request, source: RouterLog | None) -> None:
    """Begin the log of a row that joins, with what its cached tokens brought."""
    if recorder is not None:
        row.routed = recorder.new_log() if row.routed is None else row.routed
        row.routed.begin(source, row.cached)


def record_experts(recorder: RouterRecorder, rows: Sequence[Request], counts: Sequence[int]) -> None:
    """Append the experts of a pass to the logs of its rows, each of which brought so many tokens."""
    experts, first = recorder.take(), 0
    for row, count in zip(rows, counts, strict=True):
        assert row.routed is not None
        row.routed.append(experts[first : first + count])
        first += count


def restart_logs(rows: Sequence[Request]) -> None:
    """Note that all tokens of rows will pass again."""
    for row in rows:
        if row.routed is not None:
            row.routed.restart()


def _common_prefix_length(a: list[int], b: list[int]) -> int:
    """Count the tokens that both begin with."""
    if b[: len(a)] == a:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
