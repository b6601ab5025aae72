"""Requests, and the batch that they join and leave: row i of the batch is in slot i of the cache."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import anyio
from torch import Tensor

from agentrl.engines.kv import Kept, SlotCache
from agentrl.types import Completion, SamplingParams


@dataclass(eq=False)
class Row:
    """A request: its tokens so far, and how many of them the cache holds."""

    ids: list[int]
    params: SamplingParams
    session: str
    prompt_length: int
    cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None
    cancelled: bool = False
    wake: anyio.Event = field(default_factory=anyio.Event)  # it is finished, or it drives, or the engine failed

    def __post_init__(self) -> None:
        self.random = random.Random(self.params.seed)

    @property
    def over(self) -> bool:
        return self.cancelled or self.stop_reason is not None

    @property
    def fresh(self) -> int:
        return len(self.ids) - self.cached

    def take(self, token: int, logprob: float, version: int) -> None:
        if not math.isfinite(logprob):
            raise FloatingPointError("the policy's logits are not finite: its weights have diverged")
        self.cached = len(self.ids)
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.params.stop_token_ids:
            self.stop_reason = "stop"
        elif len(self.logprobs) >= self.params.max_tokens:
            self.stop_reason = "length"

    def completion(self) -> Completion:
        assert self.stop_reason is not None
        sampled = tuple(self.ids[self.prompt_length :])
        return Completion(sampled, tuple(self.logprobs), tuple(self.versions), self.stop_reason)


@dataclass
class Batch:
    """Who is sampled and who waits. ``kept`` holds what was computed for sessions that are elsewhere."""

    cache: SlotCache
    kept: Kept
    capacity: int
    prefill_tokens: int
    rows: list[Row] = field(default_factory=list)
    waiting: deque[Row] = field(default_factory=deque)

    def leave(self) -> bool:
        """Rows that are over give up their slot; the last row moves into it. Whether a caller waits for one."""
        finished = False
        for slot in reversed([slot for slot, row in enumerate(self.rows) if row.over]):
            row = self.rows[slot]
            if not row.cancelled:
                self.kept.keep(row.session, row.ids[: row.cached], self.cache.read(slot, row.cached))
                finished = True
            last = self.rows.pop()
            if last is not row:
                self.cache.write(slot, self.cache.read(len(self.rows), last.cached))
                self.rows[slot] = last
        return finished

    def join(self) -> int:
        """Waiting rows take the free slots; how many of their tokens were known.

        Up to ``prefill_tokens`` of new work come into one pass, padding included; a longer prompt comes alone.
        """
        joining: list[tuple[Row, Tensor | None]] = []
        later: list[Row] = []
        computing: set[tuple[int, ...]] = set()
        longest = 0
        while self.waiting and len(self.rows) + len(joining) < self.capacity:
            row = self.waiting.popleft()
            if row.over:
                continue
            known, prompt = self._known(row), tuple(row.ids[: row.prompt_length])
            if known is None and prompt in computing:
                later.append(row)  # a sibling computes this prompt in this very pass
                continue
            row.cached = 0 if known is None else known.shape[3]
            longest = max(longest, row.fresh)
            if joining and (len(joining) + 1) * longest > self.prefill_tokens:
                later.append(row)
                break
            if len(prompt) > 1:  # of a single token nothing can be shared
                computing.add(prompt)
            joining.append((row, known))
        self.waiting.extendleft(reversed(later))
        self._place(joining)
        return sum(row.cached for row, _ in joining)

    def _place(self, joining: list[tuple[Row, Tensor | None]]) -> None:
        for row, known in sorted(joining, key=lambda j: (j[0].fresh, j[0].cached)):  # neighbours are padded alike
            if known is not None:
                self.cache.write(len(self.rows), known)
            self.rows.append(row)

    def start_again(self) -> None:
        """Forget every key and value: the rows wait, to join again from their first token."""
        self.kept.clear()
        self.waiting.extendleft(reversed(self.rows))
        self.rows.clear()

    def _known(self, row: Row) -> Tensor | None:
        """Keys and values of a prefix of the row: of its session's last turn, or of a row with the same prompt.

        One token is always left to compute: its state gives the next logits.
        """
        own, length = self.kept.find(row.session), 0
        if own is not None:
            length = min(_common(own[0], row.ids), len(row.ids) - 1)
        shared = row.prompt_length - 1
        if length < shared and (other := self._sibling(row.ids[:shared])) is not None:
            return other
        return own[1][:, :, :, :length] if own is not None and length else None

    def _sibling(self, prefix: list[int]) -> Tensor | None:
        """Keys and values of those tokens, from whoever begins with them."""
        length = len(prefix)
        for slot, row in enumerate(self.rows):
            if row.cached >= length and row.ids[:length] == prefix:
                return self.cache.read(slot, length)
        for ids, values in self.kept.others():
            if ids[:length] == prefix:
                return values[:, :, :, :length]
        return None


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    if b[: len(a)] == a:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
