"""Rows that begin alike, as trees: tokens that several rows share, in the same place, stand once.

    rows   a b c d e f      forest   [a b c] - [d e f]      the members of a group share their prompt, and often
           a b c g h                         - [g h]        the first tokens of their answers; branches of an
           x y                       [x y]                  episode share all that came before them

Nodes with one parent are a family. They stand side by side, and their attention is one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

WORTH = 32  # tokens that sharing must save: a family costs about as much as so many tokens of a small model

Row = list[int]


@dataclass(frozen=True)
class Family:
    """Nodes with one parent, by number. ``ancestors`` are the nodes on the way to them, the root first."""

    ancestors: tuple[int, ...]
    nodes: range


@dataclass
class Forest:
    """Nodes in the order in which their tokens stand; a row is a path of nodes.

    token_ids   (tokens,)   of all nodes, one after another
    positions   (tokens,)   of each in its rows
    lengths     (nodes,)
    places      of each row the index in ``token_ids`` of each of its tokens
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    families: list[Family] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)


def grow(rows: Sequence[Row]) -> Forest:
    """The forest of some rows: best in lexicographic order, as only neighbours are compared."""
    forest = Forest(places=[[] for _ in rows])
    # families to be: their ancestors, and the rows that pass through those
    pending: list[tuple[tuple[int, ...], range]] = [((), range(len(rows)))]
    while pending:
        ancestors, members = pending.pop(0)
        begin = len(forest.places[members[0]])
        first = len(forest.lengths)
        for run in _runs(rows, members, begin):
            end = common(*(rows[i] for i in run))
            if end == begin:  # a row that ends where others go on
                continue
            at = len(forest.token_ids)
            forest.token_ids += rows[run[0]][begin:end]
            forest.positions += range(begin, end)
            for row in run:
                forest.places[row] += range(at, at + end - begin)
            if any(len(rows[row]) > end for row in run):
                pending.append(((*ancestors, len(forest.lengths)), run))
            forest.lengths.append(end - begin)
        forest.families.append(Family(ancestors, range(first, len(forest.lengths))))
    return forest


def common(*rows: Row) -> int:
    """How many tokens all of them begin with."""
    first, last = min(rows), max(rows)  # in lexicographic order the others lie between these two
    if last[: len(first)] == first:
        return len(first)
    return next(i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)


def _runs(rows: Sequence[Row], members: range, begin: int) -> list[range]:
    """Neighbours that share enough tokens from ``begin`` on to make a node of them; the others stand alone."""
    links = [common(rows[a], rows[b]) for a, b in pairwise(members)]

    def cut(first: int, end: int) -> list[range]:
        """Where a part shares too little, it falls apart at its weakest links."""
        if end - first == 1:
            return [members[first:end]]
        least = min(links[first : end - 1])
        if (least - begin) * (end - first - 1) >= WORTH:
            return [members[first:end]]
        cuts = [first, *(i + 1 for i in range(first, end - 1) if links[i] == least), end]
        return [run for a, b in pairwise(cuts) for run in cut(a, b)]

    return cut(0, len(members))
