"""Attention over a prefix forest: a token sees the tokens of its node's ancestors, and those before it in its node.

Transformers' models find ``_attend_forest`` as FOREST_ATTENTION in the registry of attention functions. So any causal
LM whose layers ask that registry can be trained on forests. The layout comes with the call of the model, through its
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from agentrl.learner.prefix_tree.flex_attention import FlexLayout
from agentrl.learner.prefix_tree.tree import PrefixForest

FOREST_ATTENTION = "agentrl_forest"
RAGGED = 64  # mean tokens a node, from which on uneven nodes are quicker one by one than padded


class _SiblingAttention:
    """The attention of nodes with one parent, padded to the longest, or one by one where they are uneven."""

    def __init__(self, lengths: list[int], ancestors: tuple[int, ...], begin: int, device: torch.device) -> None:
        self.ancestors, self.begin = ancestors, begin  # begin: the position of a node's first token
        self.count, self.longest, self.tokens = len(lengths), max(lengths), sum(lengths)
        self.even = self.tokens == self.count * self.longest
        self.device, self.lengths = device, lengths
        self.ragged = not self.even and self.tokens >= RAGGED * self.count
        if not self.even:
            index = [node * self.longest + i for node, n in enumerate(lengths) for i in range(n)]
            self.padded_index = torch.tensor(index, device=device)  # (tokens,)
        self._masks: dict[int | None, Tensor | None] = {}

    def pad(self, x: Tensor) -> Tensor:
        """Pad (tokens, heads, dim) to (nodes, longest, heads, dim)."""
        if not self.even:
            x = x.new_zeros(self.count * self.longest, *x.shape[1:]).index_copy(0, self.padded_index, x)
        return x.view(self.count, self.longest, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """Drop the padding: (nodes, longest, heads, dim) to (tokens, heads, dim)."""
        x = x.flatten(0, 1)
        return x if self.even else x.index_select(0, self.padded_index)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, nodes: Nodes, window: int | None, scale: float | None) -> Tensor:
        """Compute attention, (tokens, heads, dim) to the same. ``nodes`` has the keys and the values of all nodes."""
        mask = self.mask(window, q)
        if not self.ragged:
            keys, values = self.prepend_ancestors(nodes[0], k), self.prepend_ancestors(nodes[1], v)
            return self.unpad(_attend(self.pad(q), keys, values, mask, scale))
        before = [torch.cat([x[a] for a in self.ancestors])[None] if self.ancestors else None for x in nodes]
        outputs = []
        for own in zip(*(torch.split(x, self.lengths) for x in (q, k, v)), strict=True):
            query, *other = (x[None] for x in own)
            keys, values = (o if b is None else torch.cat([b, o], 1) for b, o in zip(before, other, strict=True))
            corner = None if mask is None else mask[: query.shape[1], : keys.shape[1]]
            outputs.append(_attend(query, keys, values, corner, scale)[0])
        return torch.cat(outputs)

    def prepend_ancestors(self, nodes: tuple[Tensor, ...], own: Tensor) -> Tensor:
        """Concatenate keys or values of the ancestors and the nodes' own: (nodes, begin + longest, heads, dim)."""
        if not self.ancestors:
            return self.pad(own)
        before = torch.cat([nodes[a] for a in self.ancestors])
        return torch.cat([before.expand(self.count, *before.shape), self.pad(own)], dim=1)

    def mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """Build the mask to be added, (longest, begin + longest); None where it is the plain triangle."""
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
    """Compute attention, (nodes, tokens, heads, dim) to the same."""
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


class SdpaLayout:
    """A forest on a device, for scaled dot product attention: one call for the children of each node."""

    def __init__(self, forest: PrefixForest, device: torch.device) -> None:
        self.token_ids = torch.tensor(forest.token_ids, dtype=torch.int64, device=device)[None]  # (1, tokens)
        self.positions = torch.tensor(forest.positions, dtype=torch.int64, device=device)[None]
        self.lengths = list(forest.lengths)
        self.siblings = [
            _SiblingAttention(
                self.lengths[f.nodes.start : f.nodes.stop],
                f.ancestors,
                sum(forest.lengths[a] for a in f.ancestors),
                device,
            )
            for f in forest.siblings
        ]
        self.sizes = [f.tokens for f in self.siblings]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
        """Compute attention, (tokens, heads, dim) to the same."""
        nodes = torch.split(key, self.lengths), torch.split(value, self.lengths)
        parts = zip(self.siblings, *(torch.split(x, self.sizes) for x in (query, key, value)), strict=True)
        return torch.cat([siblings.attend(q, k, v, nodes, window, scale) for siblings, q, k, v in parts])


class Layout(Protocol):
    """A forest on a device, and the attention over it."""

    token_ids: Tensor  # (1, tokens)
    positions: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
        """Compute attention, (tokens, heads, dim) to the same."""
        ...


LAYOUTS: dict[str, Callable[[PrefixForest, torch.device], Layout]] = {"cuda": FlexLayout}  # by the kind of device


def build_layout(forest: PrefixForest, device: torch.device) -> Layout:
    """Lay a forest out for the attention that is quickest on the device."""
    return LAYOUTS.get(device.type, SdpaLayout)(forest, device)


def _attend_forest(
    module: nn.Module,
    query: Tensor,  # (1, heads, tokens, dim)
    key: Tensor,  # (1, kv heads, tokens, dim)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    forest: Layout | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: (1, tokens, heads, dim)."""
    if kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        raise NotImplementedError("its attention is soft-capped, or has sinks")
    if forest is None:
        raise NotImplementedError("its layers do not hand on to attention what the model is called with")
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return forest.attend(q, k, v, scaling, sliding_window)[None], None


AttentionInterface.register(FOREST_ATTENTION, _attend_forest)
