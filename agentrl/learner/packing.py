"""Packing: from samples to micro-batches.

A row is an episode, and has one context or several: those go through the model each by itself, as rows do.
A micro-batch has one entry for each trained token, in row order:

targets     (trained,) int64     the token itself
logprobs    (trained,) float32   the engine's; nan where none sampled the token
advantages  (trained,) float32
weights     (trained,) float32   the reduction's
row_index   (trained,) int64     in which of the micro-batch's rows
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.learner.prefix_tree.tree import (
    MIN_SHARED_TOKENS,
    Keys,
    PrefixForest,
    build_forest,
    common_prefix_length,
    count_forest_tokens,
    encode_orders,
)
from agentrl.learner.row_arrays import Int32, RowArrays
from agentrl.types import Sample


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together. The columns are described at the top of this file."""

    rows: Sequence[RowArrays]
    row_weights: Sequence[float]

    @classmethod
    def read(cls, samples: Sequence[Sample], weights: Sequence[float] | None = None) -> MicroBatch:
        """Make it of samples; by default their tokens weigh 1."""
        return cls([RowArrays.read(sample) for sample in samples], weights or [1.0] * len(samples))

    @cached_property
    def contexts(self) -> list[Int32]:
        """List the tokens of all contexts, in row order."""
        return [context for row in self.rows for context in row.contexts]

    @cached_property
    def context_keys(self) -> list[Keys]:
        """List what decides which tokens of the contexts are shared, in row order."""
        return [key for row in self.rows for key in row.context_keys]

    @cached_property
    def trained(self) -> NDArray[np.int64]:
        """List context and position in it of each trained token, (trained, 2)."""
        masks = [row.loss_mask[a:b] for row in self.rows for a, b in pairwise([*row.starts, len(row.token_ids)])]
        places = [np.flatnonzero(mask) for mask in masks]
        contexts = np.repeat(np.arange(len(masks)), [len(own) for own in places])
        return np.stack([contexts, np.concatenate(places)], 1)

    @property
    def trained_counts(self) -> list[int]:
        """Count the trained tokens of each row."""
        return [row.trained for row in self.rows]

    @cached_property
    def targets(self) -> Tensor:
        return torch.from_numpy(np.concatenate([row.token_ids[row.loss_mask] for row in self.rows]).astype(np.int64))

    @property
    def has_demonstrated(self) -> bool:
        """Return True if no engine sampled some of the trained tokens."""
        return bool(self.logprobs.isnan().any())

    @cached_property
    def logprobs(self) -> Tensor:
        return torch.from_numpy(np.concatenate([row.logprobs for row in self.rows]))

    @cached_property
    def advantages(self) -> Tensor:
        return torch.from_numpy(np.concatenate([row.advantages for row in self.rows]))

    @cached_property
    def weights(self) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(self.row_weights, np.float32), self.trained_counts))

    @cached_property
    def row_index(self) -> Tensor:
        return torch.from_numpy(np.repeat(np.arange(len(self.rows)), self.trained_counts))

    @cached_property
    def kept(self) -> list[array[int] | None]:
        """List the set that each trained token was drawn among; None where that was all."""
        return [one for row in self.rows for one in (row.kept or [None] * row.trained)]

    @property
    def keeps_all(self) -> bool:
        """Return True where each token was drawn among all tokens."""
        return not any(row.kept for row in self.rows)

    @property
    def has_experts(self) -> bool:
        """Return True where an engine said of some tokens which experts its routers chose."""
        return any(row.experts is not None for row in self.rows)

    def split_by_row(self, values: Tensor) -> list[Tensor]:
        """Split (trained,) into one piece for each row."""
        return list(torch.split(values, self.trained_counts))

    @cached_property
    def forest(self) -> PrefixForest:
        """Return the forest of all contexts."""
        order = _sort(self.context_keys)
        forest = build_forest([self.contexts[i] for i in order], [self.context_keys[i] for i in order])
        by_context = dict(zip(order, forest.token_index, strict=True))
        return replace(forest, token_index=[by_context[i] for i in range(len(order))])


PackFunction = Callable[[Sequence[RowArrays], Sequence[float], int], list[MicroBatch]]


def pack_by_length(
    rows: Sequence[RowArrays], weights: Sequence[float], max_tokens_per_microbatch: int
) -> list[MicroBatch]:
    """Pack at most so many tokens into a micro-batch, padding included. A longer row goes alone."""
    longest = [max(map(len, row.contexts)) for row in rows]
    batches: list[list[int]] = []
    count = 0  # contexts of the last one
    for i in sorted(range(len(rows)), key=longest.__getitem__):
        count += len(rows[i].starts)
        if batches and count * longest[i] <= max_tokens_per_microbatch:
            batches[-1].append(i)
        else:
            batches.append([i])
            count = len(rows[i].starts)
    return [_build_batch(rows, weights, batch) for batch in batches]


def pack_by_prefix(
    rows: Sequence[RowArrays], weights: Sequence[float], max_tokens_per_microbatch: int
) -> list[MicroBatch]:
    """Pack at most so many tokens into a micro-batch, shared ones counted once. A longer row goes alone.

    Rows that begin alike stay together where the budget allows it: apart, what they share would stand twice. The
    largest such trees are placed first.
    """
    keys = encode_orders([row.keys for row in rows])
    order = sorted(range(len(rows)), key=keys.__getitem__)
    parts = [
        part for tree in _split_into_trees(rows, order) for part in _cut_tree(rows, tree, max_tokens_per_microbatch)
    ]
    sizes = {id(part): _count_tokens(rows, part) for part in parts}
    bins: list[list[int]] = []
    room: list[int] = []
    for part in sorted(parts, key=lambda part: -sizes[id(part)]):
        index = next((b for b, left in enumerate(room) if left >= sizes[id(part)]), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(max_tokens_per_microbatch)
        bins[index] += part
        room[index] -= sizes[id(part)]
    return [_build_batch(rows, weights, sorted(members, key=keys.__getitem__)) for members in bins]


def _split_into_trees(rows: Sequence[RowArrays], order: Sequence[int]) -> list[list[int]]:
    """Group neighbours that begin alike, in the given order."""
    trees = [[order[0]]] if order else []
    for before, i in pairwise(order):
        if common_prefix_length(rows[before].keys, rows[i].keys) >= MIN_SHARED_TOKENS:
            trees[-1].append(i)
        else:
            trees.append([i])
    return trees


def _cut_tree(rows: Sequence[RowArrays], tree: list[int], max_tokens_per_microbatch: int) -> list[list[int]]:
    """Cut a tree into parts that fit the budget."""
    parts = []
    while tree:
        count = _count_fitting([rows[i].context_keys[0] for i in tree], max_tokens_per_microbatch)
        if count > 1 and _count_tokens(rows, tree[:count]) > max_tokens_per_microbatch:
            # not all that could be shared is worth it, and some have further contexts
            sizes = range(2, count + 1)
            count = 1 + bisect_right(sizes, max_tokens_per_microbatch, key=lambda n: _count_tokens(rows, tree[:n]))
        parts.append(tree[:count])
        tree = tree[count:]
    return parts


def _count_tokens(rows: Sequence[RowArrays], members: Sequence[int]) -> int:
    """Count the tokens of some rows, shared ones once."""
    return _count_shared_once([key for i in members for key in rows[i].context_keys])


def _count_fitting(ordered: Sequence[Keys], max_tokens_per_microbatch: int) -> int:
    """Count the rows that fit, if all that neighbours have in common is shared; at least one."""
    tokens = len(ordered[0])
    for count, (before, row) in enumerate(pairwise(ordered), start=1):
        tokens += len(row) - common_prefix_length(before, row)
        if tokens > max_tokens_per_microbatch:
            return count
    return len(ordered)


def _build_batch(rows: Sequence[RowArrays], weights: Sequence[float], members: Sequence[int]) -> MicroBatch:
    return MicroBatch([rows[i] for i in members], [weights[i] for i in members])


def estimate_cost(batch: MicroBatch) -> int:
    """Estimate what a micro-batch costs, beside others: its tokens, shared ones once. Nothing of it is kept."""
    return _count_shared_once(batch.context_keys)


def make_idle_batch(token_id: int) -> MicroBatch:
    """Make a micro-batch of two tokens, of which the second is scored, and teaches nothing."""
    return MicroBatch.read([Sample([token_id] * 2, [0, 1], [0.0, 0.0], [0.0, 0.0])], [0.0])


def _count_shared_once(keys: Sequence[Keys]) -> int:
    return count_forest_tokens([keys[i] for i in _sort(keys)])


def _sort(rows: Sequence[Keys]) -> list[int]:
    """List the rows in lexicographic order of their keys, by their indices."""
    keys = encode_orders(rows)
    return sorted(range(len(rows)), key=keys.__getitem__)
