"""The embedded engine's key-value cache, and the attention that reads it.

Rows of the batch always occupy the first slots, so that a decoding step reads one slice and gathers nothing.
A row that leaves is copied out (a few hundred kilobytes), and the last one moves into its place.

    keys_values   (layers, 2, slots, positions, kv heads, head dim)
    a step        every row's new tokens, flattened: the leading rows bring one each, those behind them their prompts
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = "agentrl_slots"  # the name under which transformers' models find `attend`


class SlotCache:
    """Keys and values of the rows in the batch."""

    def __init__(self, config: Any, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._shape = (config.num_hidden_layers, 2, slots, 0, heads, dim)
        self.keys_values = torch.empty(self._shape, dtype=dtype, device=device)

    @property
    def positions(self) -> int:
        return self.keys_values.shape[3]

    def reserve(self, positions: int) -> None:
        """Room for that many positions in each slot; grows by doubling."""
        if positions <= self.positions:
            return
        old, size = self.keys_values, max(128, self.positions)
        while size < positions:
            size *= 2
        layers, two, slots, _, heads, dim = self._shape
        # zeros: a masked-out NaN would still poison the weighted sum of values
        self.keys_values = old.new_zeros((layers, two, slots, size, heads, dim))
        self.keys_values[:, :, :, : old.shape[3]] = old

    def read(self, slot: int, length: int) -> Tensor:
        return self.keys_values[:, :, slot, :length].clone()

    def write(self, slot: int, kept: Tensor) -> None:
        self.reserve(kept.shape[2])
        self.keys_values[:, :, slot, : kept.shape[2]] = kept

    def move(self, source: int, target: int, length: int) -> None:
        self.keys_values[:, :, target, :length] = self.keys_values[:, :, source, :length]


class Plan:
    """One forward pass over ragged rows.

    Args:
        fresh: for each row, in slot order, how many new tokens it brings.
        cached: for each row, how many positions its slot already holds.
    """

    def __init__(self, cache: SlotCache, fresh: Sequence[int], cached: Sequence[int]) -> None:
        device = cache.keys_values.device
        self.cache = cache
        self.rows = len(fresh)
        self.decoding = next((i for i, n in enumerate(fresh) if n > 1), self.rows)
        cache.reserve(max(n + c for n, c in zip(fresh, cached, strict=True)))
        counts = torch.tensor(fresh)
        starts = torch.tensor(cached)
        ends = counts.cumsum(0)
        rows = torch.repeat_interleave(torch.arange(self.rows), counts)  # (tokens,)
        self.positions = (starts - (ends - counts))[rows] + torch.arange(int(ends[-1]))
        self.flat = (rows * cache.positions + self.positions).to(device)  # (tokens,) into (slots x positions)
        self.last = (ends - 1).to(device)  # (rows,) the token whose logits continue the row
        self.length = int((starts + counts).max())
        d = self.decoding
        self.decode_positions = self.positions[:d].to(device)
        # the other rows, which bring several tokens, padded only inside attention: (prefilling, longest)
        longest = max(fresh[d:], default=0)
        steps = torch.arange(longest)
        self.pad_index = ((ends - counts)[d:, None] + steps).clamp(max=int(ends[-1]) - 1).to(device)
        self.pad_real = (steps < counts[d:, None]).to(device)
        self.pad_positions = (starts[d:, None] + steps).to(device)
        self.positions = self.positions.to(device)
        self._masks: dict[int | None, tuple[Tensor, Tensor]] = {}

    def masks(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Which positions a query sees: (decoding, 1, 1, length) and (prefilling, 1, longest, length)."""
        if window not in self._masks:
            keys = torch.arange(self.length, device=self.flat.device)

            def visible(queries: Tensor) -> Tensor:
                seen = keys <= queries[..., None]
                return seen if window is None else seen & (keys > queries[..., None] - window)

            self._masks[window] = visible(self.decode_positions)[:, None, None], visible(self.pad_positions)[:, None]
        return self._masks[window]


_plan: ContextVar[Plan] = ContextVar("agentrl_plan")


@dataclass
class following:
    """``with following(plan):`` a forward pass attends by that plan."""

    plan: Plan

    def __enter__(self) -> None:
        self._token = _plan.set(self.plan)

    def __exit__(self, *exception: object) -> None:
        _plan.reset(self._token)


def attend(
    module: Any,
    query: Tensor,  # (1, heads, tokens, dim)
    key: Tensor,  # (1, kv heads, tokens, dim)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface over a ``SlotCache``: (1, tokens, heads, dim)."""
    if unused.get("softcap") or unused.get("s_aux") is not None:
        raise NotImplementedError(f"{type(module).__name__} needs soft-capped attention or attention sinks")
    plan = _plan.get()
    cache, rows, d = plan.cache, plan.rows, plan.decoding
    _, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    layer = cache.keys_values[module.layer_idx]  # (2, slots, positions, kv heads, dim)
    for stored, new in zip(layer, (key, value), strict=True):
        stored.view(-1, kv_heads, dim).index_copy_(0, plan.flat, new[0].transpose(0, 1))
    keys, values = layer[:, :rows, : plan.length].transpose(2, 3)  # each (rows, kv heads, length, dim)
    decode_mask, prefill_mask = plan.masks(sliding_window)
    out = query.new_empty(tokens, heads, dim)
    if d:  # the query heads that share a key head stand as its queries: nothing is repeated
        grouped = query[0, :, :d].transpose(0, 1).reshape(d, kv_heads, heads // kv_heads, dim)
        seen = scaled_dot_product_attention(grouped, keys[:d], values[:d], attn_mask=decode_mask, scale=scaling)
        out[:d] = seen.reshape(d, heads, dim)
    if d < rows:
        padded = query[0].transpose(0, 1)[plan.pad_index].transpose(1, 2)  # (prefilling, heads, longest, dim)
        seen = scaled_dot_product_attention(
            padded, keys[d:], values[d:], attn_mask=prefill_mask, scale=scaling, enable_gqa=heads != kv_heads
        )
        out[d:] = seen.transpose(1, 2)[plan.pad_real]
    return out[None], None
