"""The blocks of attention over a forest that somebody sees, and those that everybody does, from ranges of nodes.

A token sees the tokens of its node's ancestors, and those before it in its node. Tokens of a node stand side by side,
so what a run of them sees is a range of each node on its path, and blocks follow from the ends of ranges. The (tokens,
tokens) mask itself is never there: at 32k tokens it would be gigabytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.learner.prefix_tree.tree import PrefixForest

BLOCK = 128  # tokens of a block's side


@dataclass(frozen=True)
class BlockMap:
    """The blocks of an attention matrix, (query blocks, key blocks) each.

    partial   some query of the block sees some key of it
    full      every query sees every key; such a block is not partial too
    """

    partial: Tensor
    full: Tensor


@dataclass(frozen=True)
class _Pairs:
    """Runs of queries, each beside one node of its path, (pairs,) each. A run is of one node and of one block.

    queries   first token of the run, and the one after its last
    keys      first token of the node, and the one after its last
    before    how far the run's first token stands behind the node's first, in the row
    own       the node is the run's own
    """

    queries: tuple[Tensor, Tensor]
    keys: tuple[Tensor, Tensor]
    before: Tensor
    own: Tensor

    def find_ranges(self, window: int | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Find the range of keys that some query of the run sees, and the range that every query sees."""
        (first, end), (keys_first, keys_end) = self.queries, self.keys
        some = keys_first, torch.where(self.own, end, keys_end)
        every = keys_first, torch.where(self.own, first + 1, keys_end)
        if window is not None:
            oldest = keys_first + self.before - window + 1  # that the run's first query sees
            some = torch.maximum(keys_first, oldest), some[1]
            every = torch.maximum(keys_first, oldest + (end - first - 1)), every[1]
        return some, every


def map_blocks(forest: PrefixForest, window: int | None) -> BlockMap:
    """Map the blocks of a forest's attention; a forest whose last block is not whole is a mistake of the caller."""
    count = len(forest.token_ids)
    assert count % BLOCK == 0, "the forest is padded to whole blocks"
    pairs, size = _list_pairs(forest), count // BLOCK
    (some_first, some_end), (every_first, every_end) = pairs.find_ranges(window)
    row, length = pairs.queries[0] // BLOCK, pairs.queries[1] - pairs.queries[0]
    seen = some_first < some_end
    edges = torch.zeros(size, size + 1, dtype=torch.int64)
    one = torch.ones_like(row[seen])
    edges.index_put_((row[seen], some_first[seen] // BLOCK), one, accumulate=True)
    edges.index_put_((row[seen], (some_end[seen] - 1) // BLOCK + 1), -one, accumulate=True)
    touched = edges.cumsum(1)[:, :size] > 0
    whole = every_first < every_end
    area = _sum_below(row[whole], every_end[whole], length[whole], size)
    area -= _sum_below(row[whole], every_first[whole], length[whole], size)
    full = area == BLOCK * BLOCK
    return BlockMap(touched & ~full, full)


def _sum_below(row: Tensor, ends: Tensor, weights: Tensor, size: int) -> Tensor:
    """Sum, for each block, its keys that stand before ``ends``, times their weights: (size, size)."""
    blocks, inside = torch.zeros(2, size, size + 1, dtype=torch.int64)
    place = row, ends // BLOCK
    blocks.index_put_(place, weights, accumulate=True)
    inside.index_put_(place, weights * (ends % BLOCK), accumulate=True)
    behind = blocks.flip(1).cumsum(1).flip(1) - blocks  # of the ends in later blocks
    below: Tensor = behind * BLOCK + inside
    return below[:, :size]


def _list_pairs(forest: PrefixForest) -> _Pairs:
    """List every run of queries beside every node on its path: the ancestors, and its own."""
    lengths = torch.tensor(forest.lengths)
    starts, count = lengths.cumsum(0) - lengths, len(forest.token_ids)
    positions = torch.from_numpy(forest.positions).long()
    paths = {node: (*s.ancestors, node) for s in forest.siblings for node in s.nodes}
    flat = torch.tensor([node for n in range(len(lengths)) for node in paths[n]])
    depths = torch.tensor([len(paths[n]) for n in range(len(lengths))])
    firsts: Tensor = torch.unique(torch.cat([starts, torch.arange(0, count, BLOCK)]))
    ends = torch.cat([firsts[1:], torch.tensor([count])])
    nodes = torch.searchsorted(starts, firsts, right=True) - 1  # each run's own
    depth = depths[nodes]
    run = torch.repeat_interleave(depth)
    step = torch.arange(len(run)) - (depth.cumsum(0) - depth)[run]
    node = flat[(depths.cumsum(0) - depths)[nodes[run]] + step]
    first = firsts[run]
    return _Pairs(
        (first, ends[run]),
        (starts[node], starts[node] + lengths[node]),
        positions[first] - positions[starts[node]],
        node == nodes[run],
    )
