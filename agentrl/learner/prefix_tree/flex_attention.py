"""Attention over a forest as one kernel: torch's flex attention, whose mask says who sees whom. For GPUs.

Nodes are numbered so that those below a node follow it (depth first); a node then sees another if its number lies in
the other's range. Blocks of the mask that nobody sees are skipped by the kernel. The forest is padded to whole blocks,
by a root of its own that nobody else sees: shapes repeat, and so does the compiled kernel.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo import config as dynamo
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from agentrl.errors import UserError
from agentrl.learner.prefix_tree.block_map import BLOCK, map_blocks
from agentrl.learner.prefix_tree.tree import PrefixForest, SiblingNodes
from agentrl.models.device_copy import copy_to_device

KERNELS = 64  # that are compiled at most: of precisions, windows, and sizes that happen to be equal


class FlexLayout:
    """A forest on a device, for flex attention. Its tokens are those of the forest, and the padding behind them."""

    def __init__(self, forest: PrefixForest, device: torch.device) -> None:
        self._forest = pad_to_blocks(forest)
        lengths = torch.tensor(self._forest.lengths)
        ends = (torch.tensor(ends).repeat_interleave(lengths) for ends in _number_nodes(self._forest))
        ids = (torch.from_numpy(values).long() for values in (self._forest.token_ids, self._forest.positions))
        columns = copy_to_device(torch.stack([*ids, *ends]), device)
        self.token_ids, self.positions = columns[:1], columns[1:2]  # (1, tokens)
        self._first, self._last = columns[2], columns[3]  # (tokens,): of each token's node
        self._masks: dict[int | None, BlockMask] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
        """Compute attention, (tokens, heads, dim) to the same."""
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        kernel: Any = flex_attention
        if query.device.type == "cuda":
            kernel = run_compiled
        out = kernel(q, k, v, block_mask=self.mask(window), scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        attended: Tensor = out[0].transpose(0, 1)
        return attended

    def mask(self, window: int | None) -> BlockMask:
        """Return the mask of layers with such a window; it is built once."""
        if window not in self._masks:
            first, last, at = self._first, self._last, self.positions[0]

            def seen(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                allowed = (first[k] <= first[q]) & (first[q] <= last[k]) & (at[k] <= at[q])
                return allowed if window is None else allowed & (at[k] > at[q] - window)

            blocks = map_blocks(self._forest, window)
            both = copy_to_device(torch.stack([blocks.partial, blocks.full])[:, None, None], at.device)
            counts = both.sum(-1, dtype=torch.int32)
            order = both.int().argsort(stable=True, dim=-1, descending=True).int()  # those that are marked come first
            self._masks[window] = BlockMask.from_kv_blocks(counts[0], order[0], counts[1], order[1], BLOCK, seen)
        return self._masks[window]


def pad_to_blocks(forest: PrefixForest) -> PrefixForest:
    """Add a root of padding that fills the last block; the forest itself where that is full."""
    missing = -len(forest.token_ids) % BLOCK
    if not missing:
        return forest
    return replace(
        forest,
        token_ids=np.pad(forest.token_ids, (0, missing)),
        positions=np.concatenate([forest.positions, np.arange(missing, dtype=np.int32)]),
        lengths=[*forest.lengths, missing],
        siblings=[*forest.siblings, SiblingNodes((), range(len(forest.lengths), len(forest.lengths) + 1))],
    )


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


def run_compiled(*given: Any, **named: Any) -> Any:
    """Run the compiled kernel.

    Raises:
        UserError: it would have to be compiled once more than KERNELS allows. torch would go on with a mask of all
            scores instead, at a hundredth of the speed and with gigabytes of memory, and say nothing.
    """
    try:
        with dynamo.patch(recompile_limit=KERNELS):
            return _compile_kernel()(*given, **named)
    except FailOnRecompileLimitHit as error:
        raise UserError(
            f"flex attention was compiled {KERNELS} times in this process, and something still differs at each call: "
            "TORCH_LOGS=recompiles says what; --learner.packing padded does without it"
        ) from error


@cache
def _compile_kernel(backend: str = "inductor") -> Any:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
