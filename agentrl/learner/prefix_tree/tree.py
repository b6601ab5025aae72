"""Rows that begin alike, as trees: tokens that several rows share, in the same place, stand once.

    rows   a b c d e f      forest   [a b c] - [d e f]      the members of a group share their prompt, and often
           a b c g h                         - [g h]        the first tokens of their answers; branches of an
           x y                       [x y]                  episode share all that came before them

Nodes with one parent are siblings. They stand side by side, and their attention is one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MIN_SHARED_TOKENS = (
    32  # tokens that sharing must save: an attention call costs about as much as so many tokens of a small model
)


@dataclass(frozen=True)
class SiblingNodes:
    """Nodes with one parent, as node indices. ``ancestors`` are the nodes on the way to them, the root first."""

    ancestors: tuple[int, ...]
    nodes: range


@dataclass
class PrefixForest:
    """Nodes in the order in which their tokens stand; a row is a path of nodes.

    token_ids     (tokens,)   of all nodes, one after another
    positions     (tokens,)   of each in its rows
    lengths       (nodes,)
    siblings      nodes with one parent, parents first
    token_index   (rows, length of the row)   where each token of a row stands in ``token_ids``
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    siblings: list[SiblingNodes] = field(default_factory=list)
    token_index: list[list[int]] = field(default_factory=list)


def build_forest(rows: Sequence[list[int]]) -> PrefixForest:
    """Build the forest of some rows, best in lexicographic order: only neighbours are compared."""
    forest = PrefixForest(token_index=[[] for _ in rows])
    # siblings to be: their ancestors, and the rows that pass through those
    pending: list[tuple[tuple[int, ...], range]] = [((), range(len(rows)))]
    while pending:
        ancestors, members = pending.pop(0)
        begin = len(forest.token_index[members[0]])
        first = len(forest.lengths)
        for run in _group_neighbours(rows, members, begin):
            end = common_prefix_length(*(rows[i] for i in run))
            if end == begin:  # a row that ends where others go on
                continue
            at = len(forest.token_ids)
            forest.token_ids += rows[run[0]][begin:end]
            forest.positions += range(begin, end)
            for row in run:
                forest.token_index[row] += range(at, at + end - begin)
            if any(len(rows[row]) > end for row in run):
                pending.append(((*ancestors, len(forest.lengths)), run))
            forest.lengths.append(end - begin)
        forest.siblings.append(SiblingNodes(ancestors, range(first, len(forest.lengths))))
    return forest


def common_prefix_length(*rows: list[int]) -> int:
    """Count the tokens that all rows begin with."""
    first, last = min(rows), max(rows)  # in lexicographic order the others lie between these two
    if last[: len(first)] == first:
        return len(first)
    return next(i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)


def _group_neighbours(rows: Sequence[list[int]], members: range, begin: int) -> list[range]:
    """Group neighbours that share enough tokens from ``begin`` on to make a node of them; the others stand alone."""
    links = [common_prefix_length(rows[a], rows[b]) for a, b in pairwise(members)]

    def cut(first: int, end: int) -> list[range]:
        """Cut a part that shares too little at its weakest links."""
        if end - first == 1:
            return [members[first:end]]
        least = min(links[first : end - 1])
        if (least - begin) * (end - first - 1) >= MIN_SHARED_TOKENS:
            return [members[first:end]]
        cuts = [first, *(i + 1 for i in range(first, end - 1) if links[i] == least), end]
        return [run for a, b in pairwise(cuts) for run in cut(a, b)]

    return cut(0, len(members))
