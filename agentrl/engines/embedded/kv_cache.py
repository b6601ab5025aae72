"""The embedded engine's key-value cache, and the attention that reads it.

Rows of the batch always occupy the first slots, so that a decoding step reads one slice and gathers nothing.
A row that leaves is copied out (a few hundred kilobytes), and the last one moves into its place.

    keys_values   (layers, 2, slots, kv heads, positions, head dim)
    a step        every row's new tokens, flattened: the leading rows bring one each, those behind them their prompts
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig

SLOT_ATTENTION = "agentrl_slots"  # the name under which transformers' models find `attend_slots`
Values = TypeVar("Values")  # keys and values, or whatever a batch keeps of a session
KEPT_BYTES = 128 << 20  # of an empty cache: to grow it again takes a small model longer than it saves
CALL_COST = 2048  # pairs of a query and a key that cost about as much as one more call of attention


class SlotCache:
    """Keys and values of the rows in the batch. It grows by doubling, in slots and in positions.

    Args:
        max_bytes: it holds at most, beside what a single row needs: rows wait, and slots that stand empty are given up
            for positions.
    """

    def __init__(
        self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, max_bytes: int = 1 << 62
    ) -> None:
        self.max_bytes = max_bytes
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.device, self.zero = device, torch.zeros((), dtype=dtype, device=device)
        self.keys_values = torch.zeros(
            (config.num_hidden_layers, 2, 0, self.kv_heads, 0, self.dim), dtype=dtype, device=device
        )
        self.reserve(1, 1)

    def release(self) -> None:
        """Give a large cache's memory back, with what is in it."""
        if self.keys_values.nbytes > KEPT_BYTES:
            layers, two, _, heads, _, dim = self.keys_values.shape
            self.keys_values = self.keys_values.new_zeros((layers, two, 0, heads, 0, dim))
            self.reserve(1, 1)

    def reserve(self, slots: int, positions: int) -> None:
        """Grow until there are so many slots and positions."""
        layers, two, old_slots, heads, old_positions, dim = self.keys_values.shape
        if slots <= old_slots and positions <= old_positions:
            return
        old, (new_slots, new_positions) = self.keys_values, _round_up(slots, positions)
        new_positions = max(old_positions, new_positions)
        if self._count_bytes(max(old_slots, new_slots), new_positions) <= self.max_bytes:
            new_slots = max(old_slots, new_slots)
        kept = min(old_slots, new_slots)
        # zeros: a masked-out NaN would still poison the weighted sum of values
        self.keys_values = old.new_zeros((layers, two, new_slots, heads, new_positions, dim))
        self.keys_values[:, :, :kept, :, :old_positions] = old[:, :, :kept]
        # (slots, 2 x kv heads): where each slot's keys and values begin in a layer seen as (-1, dim)
        starts = torch.arange(two * new_slots * heads, device=self.device) * new_positions
        self.slot_starts = starts.view(two, new_slots, heads).transpose(0, 1).reshape(new_slots, two * heads)
        self.keys = torch.arange(new_positions, device=self.device)

    def fits(self, slots: int, positions: int) -> bool:
        """Return True if so many slots and positions are within ``max_bytes``."""
        slots, positions = _round_up(slots, positions)
        return self._count_bytes(slots, max(positions, self.keys_values.shape[4])) <= self.max_bytes

    def _count_bytes(self, slots: int, positions: int) -> int:
        layers, two, _, heads, _, dim = self.keys_values.shape
        return layers * two * slots * heads * positions * dim * self.keys_values.element_size()

    def read(self, slot: int, length: int) -> Tensor:
        """Return a view of a slot's first positions, (layers, 2, kv heads, length, dim)."""
        return self.keys_values[:, :, slot, :, :length]

    def write(self, slot: int, keys_values: Tensor) -> None:
        """Copy keys and values, (layers, 2, kv heads, length, dim), to the beginning of a slot."""
        length = keys_values.shape[3]
        self.reserve(slot + 1, length)
        self.keys_values[:, :, slot, :, :length] = keys_values


def _round_up(slots: int, positions: int) -> tuple[int, int]:
    """Return the powers of two that hold so many slots and positions: 8 and 128 at least."""
    return max(8, 1 << (slots - 1).bit_length()), max(128, 1 << (positions - 1).bit_length())


class SessionCache(Generic[Values]):
    """Keep what was computed of sessions that are not being sampled, up to a size. The oldest are dropped first.

    The event loop forgets sessions while the engine's thread keeps others: hence the lock.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._lock = Lock()
        self._sessions: OrderedDict[str, tuple[list[int], Values, int]] = OrderedDict()

    def put(self, session: str, ids: list[int], values: Values, size: int) -> None:
        """Keep what was computed of a session's tokens, ``size`` bytes."""
        self.remove(session)
        with self._lock:
            self._sessions[session] = ids, values, size
            self.size += size
        while self.size > self.limit:
            self.remove(next(iter(self._sessions)))

    def remove(self, session: str) -> None:
        with self._lock:
            if (removed := self._sessions.pop(session, None)) is not None:
                self.size -= removed[2]

    def clear(self) -> None:
        with self._lock:
            self._sessions.clear()
            self.size = 0

    def get(self, session: str) -> tuple[list[int], Values] | None:
        with self._lock:
            kept = self._sessions.get(session)
        return None if kept is None else kept[:2]

    def values(self) -> list[tuple[list[int], Values]]:
        with self._lock:
            return [kept[:2] for kept in self._sessions.values()]


class _AttentionBlock:
    """Neighbouring rows of a pass whose attention is one call. The shorter ones are padded, but only there.

    Args:
        row, token: the first of each, in the pass.
        counts: how many tokens each row brings.
        positions: of all tokens of the pass.
    """

    def __init__(
        self, row: int, token: int, counts: Sequence[int], cached: Sequence[int], length: int, positions: Tensor
    ) -> None:
        self.longest, self.length = max(counts), length
        self.even = len(counts) * self.longest == sum(counts)
        self.causal = self.even and not any(cached)
        self.slots = slice(row, row + len(counts))
        self.tokens = slice(token, token + sum(counts))
        own = positions[self.tokens]
        if not self.even:
            table, steps = torch.tensor(counts), torch.arange(self.longest)
            index = (table.cumsum(0) - table)[:, None] + steps
            self.index = index.clamp_(max=len(own) - 1).to(positions.device)
            self.real = (steps < table[:, None]).to(positions.device)
        # of the queries, (rows, longest); padding sees what another row's token may see
        self.positions = own.view(len(counts), -1) if self.even else own[self.index]
        self._masks: dict[int | None, Tensor | None] = {}

    def mask(self, cache: SlotCache, window: int | None) -> Tensor | None:
        """Build the mask to be added: (rows, 1, longest, length); None where it is the plain triangle."""
        if window is not None and window >= self.length:
            window = None  # all is within it
        if self.causal and window is None:
            return None
        if window not in self._masks:
            queries, keys = self.positions[..., None], cache.keys[: self.length]
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            self._masks[window] = torch.where(seen, cache.zero, -torch.inf)[:, None]
        return self._masks[window]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """Compute attention, (tokens, heads, dim) to the same; keys and values are (rows, kv heads, length, dim)."""
        rows, kv_heads, _, dim = keys.shape
        if self.longest == 1 and mask is not None:  # query heads that share a key head stand as its queries
            grouped = query.reshape(rows * kv_heads, -1, dim)
            hidden = mask.expand(rows, kv_heads, 1, -1).reshape(rows * kv_heads, 1, -1)
            scale = dim**-0.5 if scale is None else scale
            scores = torch.baddbmm(hidden, grouped, keys.flatten(0, 1).transpose(1, 2), alpha=scale)
            return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(query.shape)
        padded = query.view(rows, -1, *query.shape[1:]) if self.even else query[self.index]
        seen = scaled_dot_product_attention(
            padded.transpose(1, 2),  # (rows, heads, longest, dim)
            keys,
            values,
            mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != kv_heads,
        ).transpose(1, 2)
        return seen.reshape(query.shape) if self.even else seen[self.real]


class ForwardBatch:
    """One forward pass over ragged rows, which stand in the slots from ``first`` on.

    Args:
        new: for each row its new tokens; rows that bring equally many should be neighbours.
        cached: for each row, how many positions its slot already holds.
    """

    def __init__(self, cache: SlotCache, new: Sequence[Sequence[int]], cached: Sequence[int], first: int = 0) -> None:
        self.cache, self.first = cache, first
        counts = [len(n) for n in new]
        cache.reserve(first + len(new), max(n + c for n, c in zip(counts, cached, strict=True)))
        ids = [t for tokens in new for t in tokens]
        positions = [p for n, c in zip(counts, cached, strict=True) for p in range(c, c + n)]
        slots = [first + i for i, n in enumerate(counts) for _ in range(n)]
        packed = torch.tensor([ids, positions, slots]).to(cache.device)  # one transfer
        self.ids, self.positions = packed[0], packed[1]  # (tokens,)
        self.cache_index = cache.slot_starts[packed[2]] + self.positions[:, None]  # (tokens, 2 x kv heads)
        self.blocks = list(self._split_into_blocks(counts, cached))
        # (rows,) the token whose state continues the row; None where each row has one token
        self.last = None if len(ids) == len(new) else torch.tensor(counts).cumsum(0).sub_(1).to(cache.device)

    def _split_into_blocks(self, counts: Sequence[int], cached: Sequence[int]) -> Iterator[_AttentionBlock]:
        """Put neighbours into one block as long as padding them costs less than another call would."""
        row = token = longest = length = 0
        for i, (n, c) in enumerate(zip(counts, cached, strict=True)):
            together = (i + 1 - row) * max(longest, n) * max(length, n + c)
            apart = (i - row) * longest * length + n * (n + c) + CALL_COST
            if i > row and ((n == 1) != (longest == 1) or together > apart):
                yield _AttentionBlock(row, token, counts[row:i], cached[row:i], length, self.positions)
                row, token, longest, length = i, token + sum(counts[row:i]), 0, 0
            longest, length = max(longest, n), max(length, n + c)
        yield _AttentionBlock(row, token, counts[row:], cached[row:], length, self.positions)

    def write(self, layer: int, new: Tensor) -> None:
        """Store (tokens, 2 x kv heads, dim): the keys of all heads, then the values."""
        self.cache.keys_values[layer].view(-1, self.cache.dim)[self.cache_index] = new

    def attend(self, layer: int, query: Tensor, scale: float | None, window: int | None = None) -> Tensor:
        """Compute attention, (tokens, heads, dim) to the same, over what the rows' slots hold."""
        outputs, slots = [], self.cache.keys_values[layer, :, self.first :]
        for block in self.blocks:
            keys, values = slots[:, block.slots, :, : block.length]
            mask = block.mask(self.cache, window)
            outputs.append(block.attend(query[block.tokens], keys, values, mask, scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


_batch: ContextVar[ForwardBatch] = ContextVar("agentrl_batch")


@contextmanager
def use_batch(batch: ForwardBatch) -> Iterator[None]:
    """Let `attend_slots` compute the attention of this batch until the block ends."""
    token = _batch.set(batch)
    try:
        yield
    finally:
        _batch.reset(token)


def attend_slots(
    module: Any,  # an attention layer
    query: Tensor,  # (1, heads, tokens, dim)
    key: Tensor,  # (1, kv heads, tokens, dim)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface, (1, tokens, heads, dim), for the batch in use."""
    if kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise NotImplementedError("its attention is soft-capped, or has sinks")
    batch = _batch.get()
    expected = (batch.cache.kv_heads, batch.cache.dim)
    if any((t.shape[1], t.shape[3]) != expected for t in (key, value)):
        raise NotImplementedError("its layers hold keys and values of different shapes")
    if module.layer_idx >= len(batch.cache.keys_values):
        raise NotImplementedError("it attends more often than it has layers")
    batch.write(module.layer_idx, torch.cat((key[0], value[0])).transpose(0, 1))
    out = batch.attend(module.layer_idx, query[0].transpose(0, 1), scaling, sliding_window)
    return out[None], None
