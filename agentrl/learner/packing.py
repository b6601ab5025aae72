"""Packing: from samples to micro-batches.

A micro-batch has one entry for each trained token, in row order:

targets     (trained,) int64     the token itself
logprobs    (trained,) float32   the engine's
advantages  (trained,) float32
weights     (trained,) float32   the reduction's
row_index   (trained,) int64     in which of the micro-batch's rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from agentrl.learner.prefix_tree.tree import MIN_SHARED_TOKENS, PrefixForest, build_forest, common_prefix_length
from agentrl.types import Sample


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together. The columns are described at the top of this file."""

    rows: Sequence[Sample]
    row_weights: Sequence[float]

    @cached_property
    def trained(self) -> list[tuple[int, int]]:
        """List row and position of each trained token."""
        return [(r, p) for r, row in enumerate(self.rows) for p, mask in enumerate(row.loss_mask) if mask]

    @cached_property
    def targets(self) -> Tensor:
        return torch.tensor([self.rows[r].token_ids[p] for r, p in self.trained], dtype=torch.int64)

    @cached_property
    def logprobs(self) -> Tensor:
        return torch.tensor([self.rows[r].logprobs[p] for r, p in self.trained])

    @cached_property
    def advantages(self) -> Tensor:
        return torch.tensor([self.rows[r].advantages[p] for r, p in self.trained])

    @cached_property
    def weights(self) -> Tensor:
        return torch.tensor([self.row_weights[r] for r, _ in self.trained])

    @cached_property
    def row_index(self) -> Tensor:
        return torch.tensor([r for r, _ in self.trained], dtype=torch.int64)

    @property
    def keeps_all(self) -> bool:
        """Return True where each token was drawn among all tokens."""
        return not any(row.kept for row in self.rows)

    def split_by_row(self, values: Tensor) -> list[Tensor]:
        """Split (trained,) into one piece for each row."""
        return list(torch.split(values, [sum(row.loss_mask) for row in self.rows]))

    @cached_property
    def forest(self) -> PrefixForest:
        return build_forest([r.token_ids for r in self.rows])


PackFunction = Callable[[Sequence[Sample], Sequence[float], int], list[MicroBatch]]


def pack_by_length(
    rows: Sequence[Sample], weights: Sequence[float], max_tokens_per_microbatch: int
) -> list[MicroBatch]:
    """Pack at most so many tokens into a micro-batch, padding included. A longer row goes alone."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].token_ids))
    batches: list[list[int]] = []
    for i in order:
        if batches and (len(batches[-1]) + 1) * len(rows[i].token_ids) <= max_tokens_per_microbatch:
            batches[-1].append(i)
        else:
            batches.append([i])
    return [_build_batch(rows, weights, batch) for batch in batches]


def pack_by_prefix(
    rows: Sequence[Sample], weights: Sequence[float], max_tokens_per_microbatch: int
) -> list[MicroBatch]:
    """Pack at most so many tokens into a micro-batch, shared ones counted once. A longer row goes alone.

    Rows that begin alike stay together where the budget allows it: apart, what they share would stand twice. The
    largest such trees are placed first.
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i].token_ids)
    parts = [
        part for tree in _split_into_trees(rows, order) for part in _cut_tree(rows, tree, max_tokens_per_microbatch)
    ]
    sizes = {id(part): len(build_forest([rows[i].token_ids for i in part]).token_ids) for part in parts}
    bins: list[list[int]] = []
    room: list[int] = []
    for part in sorted(parts, key=lambda part: -sizes[id(part)]):
        index = next((b for b, left in enumerate(room) if left >= sizes[id(part)]), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(max_tokens_per_microbatch)
        bins[index] += part
        room[index] -= sizes[id(part)]
    return [_build_batch(rows, weights, sorted(members, key=lambda i: rows[i].token_ids)) for members in bins]


def _split_into_trees(rows: Sequence[Sample], order: Sequence[int]) -> list[list[int]]:
    """Group neighbours that begin alike, in the given order."""
    trees = [[order[0]]] if order else []
    for before, i in pairwise(order):
        if common_prefix_length(rows[before].token_ids, rows[i].token_ids) >= MIN_SHARED_TOKENS:
            trees[-1].append(i)
        else:
            trees.append([i])
    return trees


def _cut_tree(rows: Sequence[Sample], tree: list[int], max_tokens_per_microbatch: int) -> list[list[int]]:
    """Cut a tree into parts that fit the budget."""
    parts = []
    while tree:
        count = _count_fitting([rows[i].token_ids for i in tree], max_tokens_per_microbatch)
        while (
            count > 1
            and len(build_forest([rows[i].token_ids for i in tree[:count]]).token_ids) > max_tokens_per_microbatch
        ):
            count -= 1  # not all that could be shared is worth it
        parts.append(tree[:count])
        tree = tree[count:]
    return parts


def _count_fitting(ordered: Sequence[list[int]], max_tokens_per_microbatch: int) -> int:
    """Count the rows that fit, if all that neighbours have in common is shared; at least one."""
    tokens = len(ordered[0])
    for count, (before, row) in enumerate(pairwise(ordered), start=1):
        tokens += len(row) - common_prefix_length(before, row)
        if tokens > max_tokens_per_microbatch:
            return count
    return len(ordered)


def _build_batch(rows: Sequence[Sample], weights: Sequence[float], members: Sequence[int]) -> MicroBatch:
    return MicroBatch([rows[i] for i in members], [weights[i] for i in members])
