"""Attention over a forest as one kernel: torch's flex attention, whose mask says who sees whom. For GPUs.

Nodes are numbered so that those below a node follow it (depth first); a node then sees another if its number lies in
the other's range. Blocks of the mask that nobody sees are skipped by the kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from agentrl.learner.prefix_tree.tree import PrefixForest

BLOCK = 128


class FlexLayout:
    """A forest on a device, for flex attention."""

    def __init__(self, forest: PrefixForest, device: torch.device) -> None:
        self.token_ids = torch.tensor([forest.token_ids], device=device)  # (1, tokens)
        self.positions = torch.tensor([forest.positions], device=device)
        lengths = torch.tensor(forest.lengths)
        self._first, self._last = (  # (tokens,): of each token's node
            torch.tensor(ends).repeat_interleave(lengths).to(device) for ends in _number_nodes(forest)
        )
        self._masks: dict[int | None, BlockMask] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
        """Compute attention, (tokens, heads, dim) to the same."""
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        kernel = _compile_kernel() if query.device.type == "cuda" else flex_attention
        out: Any = kernel(q, k, v, block_mask=self._mask(window), scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        attended: Tensor = out[0].transpose(0, 1)
        return attended

    def _mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            first, last, at = self._first, self._last, self.positions[0]

            def seen(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                allowed = (first[k] <= first[q]) & (first[q] <= last[k]) & (at[k] <= at[q])
                return allowed if window is None else allowed & (at[k] > at[q] - window)

            count = len(first)
            self._masks[window] = create_block_mask(seen, None, None, count, count, str(at.device), BLOCK)
        return self._masks[window]


def _number_nodes(forest: PrefixForest) -> tuple[list[int], list[int]]:
    """Number the nodes depth first; return each node's number, and the last number below it."""
    below: dict[int, list[int]] = {}
    for siblings in forest.siblings:
        below.setdefault(siblings.ancestors[-1] if siblings.ancestors else -1, []).extend(siblings.nodes)
    first, last = [0] * len(forest.lengths), [0] * len(forest.lengths)
    count = 0
    pending = [(node, False) for node in reversed(below.get(-1, []))]
    while pending:
        node, left = pending.pop()
        if left:
            last[node] = count - 1
            continue
        first[node], count = count, count + 1
        pending.append((node, True))
        pending += [(child, False) for child in reversed(below.get(node, []))]
    return first, last


@cache
def _compile_kernel() -> Any:
    return torch.compile(flex_attention, dynamic=True)
