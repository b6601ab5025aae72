"""Attention over a forest: a node's tokens see those of its ancestors, and in their own node those before them.

Transformers' models find ``attend`` under its name in the registry of attention functions, so that any causal LM whose
layers ask that registry can be trained on forests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.learner.forest import Forest

ATTENTION = "agentrl_forest"


class _Family:
    """Nodes that stand side by side from token ``first`` on, padded to the longest."""

    def __init__(self, lengths: list[int], ancestors: tuple[int, ...], begin: int, device: torch.device) -> None:
        self.ancestors, self.begin = ancestors, begin  # begin: the position of a node's first token
        self.count, self.longest, self.tokens = len(lengths), max(lengths), sum(lengths)
        self.even = self.tokens == self.count * self.longest
        self.device = device
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


class Layout:
    """A forest, as attention needs it on a device."""

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
        key_nodes, value_nodes = torch.split(key, self.lengths), torch.split(value, self.lengths)
        found = []
        for family, q, k, v in zip(
            self.families, *(torch.split(x, self.sizes) for x in (query, key, value)), strict=True
        ):
            mask = family.mask(window, query)
            out = scaled_dot_product_attention(
                family.pad(q).transpose(1, 2),  # (nodes, heads, longest, dim)
                family.seen(key_nodes, k).transpose(1, 2),
                family.seen(value_nodes, v).transpose(1, 2),
                mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            found.append(family.unpad(out.transpose(1, 2)))
        return torch.cat(found)


_current: Layout | None = None  # no ContextVar: a backward pass that computes again does so in a thread of its own


@contextmanager
def following(model: Any, layout: Layout) -> Iterator[None]:
    """Inside, the model's attention is ``attend``, by this layout. Raises NotImplementedError where it cannot be."""
    global _current
    config = model.config.get_text_config()
    before = config._attn_implementation
    _current = layout
    try:
        model.set_attn_implementation(ATTENTION)
        if config._attn_implementation != ATTENTION or getattr(config, "attention_chunk_size", None):
            raise NotImplementedError("it does not use transformers' attention interface, or attends in chunks")
        yield
    finally:
        _current = None
        model.set_attn_implementation(before)


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
    """Transformers' attention interface: (1, tokens, heads, dim)."""
    if unused.get("softcap") or unused.get("s_aux") is not None:
        raise NotImplementedError("its attention is soft-capped, or has sinks")
    if _current is None:
        raise RuntimeError("attention over a forest, without a forest")
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return _current.attend(q, k, v, scaling, sliding_window)[None], None


AttentionInterface.register(ATTENTION, attend)
