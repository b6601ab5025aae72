"""From samples to micro-batches.

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

from agentrl.learner.forest import WORTH, Forest, common, grow
from agentrl.types import Sample


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together; the legend is at the top of this file."""

    rows: Sequence[Sample]
    row_weights: Sequence[float]

    @cached_property
    def trained(self) -> list[tuple[int, int]]:
        """Row and position of each trained token."""
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

    def by_row(self, values: Tensor) -> list[Tensor]:
        """(trained,) cut into one piece for each row."""
        return list(torch.split(values, [sum(row.loss_mask) for row in self.rows]))

    @cached_property
    def forest(self) -> Forest:
        return grow([r.token_ids for r in self.rows])


Pack = Callable[[Sequence[Sample], Sequence[float], int], list[MicroBatch]]


def by_length(rows: Sequence[Sample], weights: Sequence[float], token_budget: int) -> list[MicroBatch]:
    """Micro-batches of at most ``token_budget`` tokens, padding included; a longer row goes alone."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].token_ids))
    batches: list[list[int]] = []
    for i in order:
        if batches and (len(batches[-1]) + 1) * len(rows[i].token_ids) <= token_budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return [_made(rows, weights, batch) for batch in batches]


def by_prefix(rows: Sequence[Sample], weights: Sequence[float], token_budget: int) -> list[MicroBatch]:
    """Micro-batches of at most ``token_budget`` tokens, shared ones counted once; a longer row goes alone.

    Rows that begin alike stay together where the budget allows it: apart, what they share would stand twice. The
    largest such trees choose their place first.
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i].token_ids)
    parts = [part for tree in _trees(rows, order) for part in _parts(rows, tree, token_budget)]
    sizes = {id(part): len(grow([rows[i].token_ids for i in part]).token_ids) for part in parts}
    bins: list[list[int]] = []
    room: list[int] = []
    for part in sorted(parts, key=lambda part: -sizes[id(part)]):
        place = next((b for b, left in enumerate(room) if left >= sizes[id(part)]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(token_budget)
        bins[place] += part
        room[place] -= sizes[id(part)]
    return [_made(rows, weights, sorted(chosen, key=lambda i: rows[i].token_ids)) for chosen in bins]


def _trees(rows: Sequence[Sample], order: Sequence[int]) -> list[list[int]]:
    """Neighbours that begin alike, in the order given."""
    found = [[order[0]]] if order else []
    for before, i in pairwise(order):
        if common(rows[before].token_ids, rows[i].token_ids) >= WORTH:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def _parts(rows: Sequence[Sample], tree: list[int], token_budget: int) -> list[list[int]]:
    """A tree, cut where it is over the budget."""
    parts = []
    while tree:
        most = _count([rows[i].token_ids for i in tree], token_budget)
        while most > 1 and len(grow([rows[i].token_ids for i in tree[:most]]).token_ids) > token_budget:
            most -= 1  # not all that could be shared is worth it
        parts.append(tree[:most])
        tree = tree[most:]
    return parts


def _count(ordered: Sequence[list[int]], token_budget: int) -> int:
    """How many of the rows fit, if all that neighbours have in common is shared; at least one."""
    tokens = len(ordered[0])
    for count, (before, row) in enumerate(pairwise(ordered), start=1):
        tokens += len(row) - common(before, row)
        if tokens > token_budget:
            return count
    return len(ordered)


def _made(rows: Sequence[Sample], weights: Sequence[float], chosen: Sequence[int]) -> MicroBatch:
    return MicroBatch([rows[i] for i in chosen], [weights[i] for i in chosen])
