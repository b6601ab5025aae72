"""Rows that begin alike, as trees: tokens that several rows share, in the same place, stand once.

    rows   a b c d e f      forest   [a b c] - [d e f]      the members of a group share their prompt, and often
           a b c g h                         - [g h]        the first tokens of their answers; branches of an
           x y                       [x y]                  episode share all that came before them

Nodes with one parent are siblings. They stand side by side, and their attention is one operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MIN_SHARED_TOKENS = (
    32  # tokens that sharing must save: an attention call costs about as much as so many tokens of a small model
)

TokenIds = NDArray[np.int32]
Keys = NDArray[np.int32] | NDArray[np.int64]  # of tokens: a row shares those that have the same key as another's
_NONE = np.empty(0, np.int32)


@dataclass(frozen=True)
class SiblingNodes:
    """Nodes with one parent, as node indices. ``ancestors`` are the nodes on the way to them, the root first."""

    ancestors: tuple[int, ...]
    nodes: range


@dataclass(frozen=True, eq=False)
class PrefixForest:
    """Nodes in the order in which their tokens stand; a row is a path of nodes.

    token_ids     (tokens,)   of all nodes, one after another
    positions     (tokens,)   of each in its rows
    lengths       (nodes,)
    siblings      nodes with one parent, parents first
    token_index   (rows, length of the row)   where each token of a row stands in ``token_ids``
    """

    token_ids: TokenIds
    positions: TokenIds
    lengths: Sequence[int]
    siblings: Sequence[SiblingNodes]
    token_index: Sequence[TokenIds]


def build_forest(rows: Sequence[TokenIds | Sequence[int]], keys: Sequence[Keys] | None = None) -> PrefixForest:
    """Build the forest of some rows, best in lexicographic order: only neighbours are compared.

    Args:
        keys: of the rows' tokens, where those are not shared wherever they are the same ones.
    """
    arrays = [np.asarray(row, np.int32) for row in rows]
    lengths: list[int] = []
    siblings: list[SiblingNodes] = []
    ids, positions, index = [_NONE], [_NONE], [[_NONE] for _ in rows]  # pieces, a node each
    at = 0
    for ancestors, nodes in _find_siblings(arrays if keys is None else keys):
        siblings.append(SiblingNodes(ancestors, range(len(lengths), len(lengths) + len(nodes))))
        for run, begin, end in nodes:
            places = np.arange(at, at + end - begin, dtype=np.int32)
            ids.append(arrays[run[0]][begin:end])
            positions.append(np.arange(begin, end, dtype=np.int32))
            for row in run:
                index[row].append(places)
            lengths.append(end - begin)
            at += end - begin
    token_index = [np.concatenate(pieces) for pieces in index]
    return PrefixForest(np.concatenate(ids), np.concatenate(positions), lengths, siblings, token_index)


def count_forest_tokens(rows: Sequence[Keys]) -> int:
    """Count the tokens of the forest of some rows, without building it."""
    return sum(end - begin for _, nodes in _find_siblings(rows) for _, begin, end in nodes)


def encode_orders(rows: Sequence[Keys]) -> list[bytes]:
    """Return bytes that compare as rows do: by their first different token, and a beginning before the whole."""
    width = max((row.itemsize for row in rows), default=4)
    return [row.astype(f">u{width}").tobytes() for row in rows]


def common_prefix_length(one: Keys, other: Keys) -> int:
    """Count the tokens that both rows begin with."""
    shorter = min(len(one), len(other))
    differ = one[:shorter] != other[:shorter]
    return int(differ.argmax()) if differ.any() else shorter


def _find_siblings(rows: Sequence[Keys]) -> Iterator[tuple[tuple[int, ...], list[tuple[range, int, int]]]]:
    """Find the nodes with one parent, parents first: their ancestors, and of each the rows that pass through it.

    Beside these stand the positions of the node's first token, and of the one behind its last.
    """
    links = [common_prefix_length(a, b) for a, b in pairwise(rows)]
    # siblings to be: their ancestors, the rows that pass through those, and where these rows go on
    pending: deque[tuple[tuple[int, ...], range, int]] = deque([((), range(len(rows)), 0)])
    count = 0
    while pending:
        ancestors, members, begin = pending.popleft()
        nodes = []
        for run in _group_neighbours(links, members, begin):
            end = min(links[run.start : run.stop - 1], default=len(rows[run.start]))
            if end == begin:  # a row that ends where others go on
                continue
            nodes.append((run, begin, end))
            if any(len(rows[row]) > end for row in run):
                pending.append(((*ancestors, count), run, end))
            count += 1
        yield ancestors, nodes


def _group_neighbours(links: Sequence[int], members: range, begin: int) -> list[range]:
    """Group neighbours that share enough tokens from ``begin`` on to make a node of them; the others stand alone."""

    def cut(first: int, end: int) -> list[range]:
        """Cut a part that shares too little at its weakest links."""
        if end - first == 1:
            return [range(first, end)]
        least = min(links[first : end - 1])
        if (least - begin) * (end - first - 1) >= MIN_SHARED_TOKENS:
            return [range(first, end)]
        cuts = [first, *(i + 1 for i in range(first, end - 1) if links[i] == least), end]
        return [run for a, b in pairwise(cuts) for run in cut(a, b)]

    return cut(members.start, members.stop)
