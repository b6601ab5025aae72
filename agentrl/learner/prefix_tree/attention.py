"""Attention over a forest: a node's tokens see those of its ancestors, and in their own node those before them.

Transformers' models find ``attend`` under its name in the registry of attention functions, so that any causal LM whose
layers ask that registry can be trained on forests. The layout comes with the call of the model, through its layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.learner.flex import FlexLayout
from agentrl.learner.forest import Forest

ATTENTION = "agentrl_forest"
RAGGED = 64  # tokens a node in the mean, from which on uneven nodes are better off one by one than padded


class _Family:
    """Nodes that stand side by side from token ``first`` on, padded to the longest."""

    def __init__(self, lengths: list[int], ancestors: tuple[int, ...], begin: int, device: torch.device) -> None:
        self.ancestors, self.begin = ancestors, begin  # begin: the position of a node's first token
        self.count, self.longest, self.tokens = len(lengths), max(lengths), sum(lengths)
        self.even = self.tokens == self.count * self.longest
        self.device, self.lengths = device, lengths
        self.ragged = not self.even and self.tokens >= RAGGED * self.count
        if not self.even:
            places = [node * self.longest + i for node, n in enumerate(lengths) for i in range(n)]
            self.places = torch.tensor(places, device=device)
        self._masks: dict[int | None, Tensor | None] = {}

    def pad(self, x: Tensor) -> Tensor:
        """(tokens, heads, dim) to (nodes, longest, heads, dim)"""
        if not self.even:
            x = x.new_zeros(self.count * self.longest, *x.shape[1:]).index_copy(0, self.places, x)
        return x.view(self.count, self.longest, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        return x if self.even else x.index_select(0, self.places)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, nodes: Nodes, window: int | None, scale: float | None) -> Tensor:
        """(tokens, heads, dim) to the same. ``nodes`` has the keys and the values of all nodes."""
        mask = self.mask(window, q)
        if not self.ragged:
            keys, values = self.seen(nodes[0], k), self.seen(nodes[1], v)
            return self.unpad(_attend(self.pad(q), keys, values, mask, scale))
        before = [torch.cat([of[a] for a in self.ancestors])[None] if self.ancestors else None for of in nodes]
        found = []
        for own in zip(*(torch.split(x, self.lengths) for x in (q, k, v)), strict=True):
            query, *other = (x[None] for x in own)
            keys, values = (o if b is None else torch.cat([b, o], 1) for b, o in zip(before, other, strict=True))
            corner = None if mask is None else mask[: query.shape[1], : keys.shape[1]]
            found.append(_attend(query, keys, values, corner, scale)[0])
        return torch.cat(found)

    def seen(self, nodes: tuple[Tensor, ...], own: Tensor) -> Tensor:
        """Keys or values of the ancestors, then the family's own: (nodes, begin + longest, heads, dim)"""
        if not self.ancestors:
            return self.pad(own)
        before = torch.cat([nodes[a] for a in self.ancestors])
        return torch.cat([before.expand(self.count, *before.shape), self.pad(own)], dim=1)

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """To be added, (longest, begin + longest); None where it is the plain triangle."""
        if not self.begin and window is None:
            return None
        if window not in self._masks:
            keys = torch.arange(self.begin + self.longest, device=self.device)
            queries = keys[self.begin :, None]
            allowed = keys <= queries if window is None else (keys <= queries) & (keys > queries - window)
            self._masks[window] = torch.where(allowed, 0.0, -torch.inf).to(like.dtype)
        return self._masks[window]


Nodes = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """(nodes, tokens, heads, dim) to the same."""
    out = scaled_dot_product_attention(
        query.transpose(1, 2),  # (nodes, heads, tokens, dim)
        key.transpose(1, 2),
        value.transpose(1, 2),
        mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2)


class Layout:
    """A forest, as attention needs it on a device: family by family, in plain torch."""

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self.token_ids = torch.tensor([forest.token_ids], device=device)  # (1, tokens)
        self.positions = torch.tensor([forest.positions], device=device)
        self.lengths = forest.lengths
        self.families = [
            _Family(
                forest.lengths[f.nodes.start : f.nodes.stop],
                f.ancestors,
                sum(forest.lengths[a] for a in f.ancestors),
                device,
            )
            for f in forest.families
        ]
        self.sizes = [f.tokens for f in self.families]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
        """(tokens, heads, dim) to the same."""
        nodes = torch.split(key, self.lengths), torch.split(value, self.lengths)
        parts = zip(self.families, *(torch.split(x, self.sizes) for x in (query, key, value)), strict=True)
        return torch.cat([family.attend(q, k, v, nodes, window, scale) for family, q, k, v in parts])


def layout(forest: Forest, device: torch.device) -> Layout | FlexLayout:
    """As it is quickest there."""
    return FlexLayout(forest, device) if device.type == "cuda" else Layout(forest, device)


@contextmanager
def attending(model: Any) -> Iterator[None]:
    """Inside, the model's attention is ``attend``: also for a backward pass that computes again what was not kept.

    Raises NotImplementedError where it cannot be.
    """
    config = model.config.get_text_config()
    before = config._attn_implementation
    try:
        model.set_attn_implementation(ATTENTION)
        if config._attn_implementation != ATTENTION:
            raise NotImplementedError("it does not use transformers' attention interface")
        yield
    finally:
        model.set_attn_implementation(before)


def attend(
    module: Any,
    query: Tensor,  # (1, heads, tokens, dim)
    key: Tensor,  # (1, kv heads, tokens, dim)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    forest: Layout | FlexLayout | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: (1, tokens, heads, dim)."""
    if unused.get("softcap") or unused.get("s_aux") is not None:
        raise NotImplementedError("its attention is soft-capped, or has sinks")
    if forest is None:
        raise NotImplementedError("its layers do not hand on to attention what the model is called with")
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return forest.attend(q, k, v, scaling, sliding_window)[None], None


AttentionInterface.register(ATTENTION, attend)
