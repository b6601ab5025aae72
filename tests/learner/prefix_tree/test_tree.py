"""Rows as a forest: every row is a path, nothing that is worth sharing stands twice."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.learner.prefix_tree.tree import (
    MIN_SHARED_TOKENS,
    PrefixForest,
    build_forest,
    common_prefix_length,
    count_forest_tokens,
    encode_orders,
)

LONG = list(range(1000, 1000 + MIN_SHARED_TOKENS))


def tokens_of(forest: PrefixForest) -> list[list[int]]:
    return [[forest.token_ids[i] for i in places] for places in forest.token_index]


@st.composite
def rows(draw: st.DrawFn) -> list[list[int]]:
    """Few different blocks, so that rows share many beginnings, of many lengths."""
    blocks = st.sampled_from([LONG, LONG[:20], [1], [2], [3, 4, 5]])
    lists = st.lists(blocks, min_size=1, max_size=5).map(lambda parts: [t for part in parts for t in part])
    return sorted(draw(st.lists(lists, min_size=1, max_size=12)))


@given(rows())
def test_every_row_is_a_path(given_rows: list[list[int]]) -> None:
    forest = build_forest(given_rows)
    assert tokens_of(forest) == given_rows
    for places in forest.token_index:
        assert [forest.positions[i] for i in places] == list(range(len(places)))
    assert sum(forest.lengths) == len(forest.token_ids) == len(forest.positions)
    assert all(forest.lengths)
    assert count_forest_tokens([np.array(row, np.int32) for row in given_rows]) == len(forest.token_ids)
    assert [n for siblings in forest.siblings for n in siblings.nodes] == list(range(len(forest.lengths)))


@given(rows())
def test_a_node_s_row_passes_its_ancestors_just_before(given_rows: list[list[int]]) -> None:
    forest = build_forest(given_rows)
    starts = [sum(forest.lengths[:n]) for n in range(len(forest.lengths))]
    for siblings in forest.siblings:
        for node in siblings.nodes:
            path = [i for n in (*siblings.ancestors, node) for i in range(starts[n], starts[n] + forest.lengths[n])]
            assert any(places[: len(path)].tolist() == path for places in forest.token_index)


def test_the_prompt_of_a_group_stands_once() -> None:
    forest = build_forest([[*LONG, 1, 2], [*LONG, 3], [*LONG, 3, 4]])
    assert forest.token_ids.tolist() == [*LONG, 1, 2, 3, 3, 4]
    assert [(f.ancestors, list(f.nodes)) for f in forest.siblings] == [((), [0]), ((0,), [1, 2, 3])]


def test_the_same_row_twice_stands_once() -> None:
    assert build_forest([LONG, LONG]).token_ids.tolist() == LONG
    assert build_forest([LONG, [*LONG, 7]]).token_ids.tolist() == [*LONG, 7]


def test_answers_that_begin_alike_share_that_too() -> None:
    call = list(range(40))
    forest = build_forest(sorted([[*LONG, *call, 50], [*LONG, *call, 51], [*LONG, 60]]))
    assert len(forest.token_ids) == MIN_SHARED_TOKENS + 40 + 3


def test_what_is_not_worth_it_is_not_shared() -> None:
    few = list(range(MIN_SHARED_TOKENS - 1))
    assert len(build_forest([[*few, 1], [*few, 2]]).siblings) == 1
    assert len(build_forest([[*few, 1], [*few, 2], [*few, 3]]).siblings) == 2


def test_a_weak_link_does_not_hide_strong_ones() -> None:
    other = [9, *LONG]
    forest = build_forest(sorted([[*LONG, 1], [*LONG, 2], [*other, 1], [*other, 2]]))
    assert len(forest.token_ids) == 2 * MIN_SHARED_TOKENS + 1 + 4


@given(st.lists(st.lists(st.integers(0, 300_000), max_size=4) | st.lists(st.integers(0, 1), max_size=6), min_size=2))
def test_bytes_are_in_the_order_of_rows_and_beginnings_are_found(given_rows: list[list[int]]) -> None:
    arrays = [np.array(row, np.int32) for row in given_rows]
    order = sorted(range(len(arrays)), key=encode_orders(arrays).__getitem__)
    assert [given_rows[i] for i in order] == sorted(given_rows)
    for (row, one), (other_row, other) in pairwise(zip(given_rows, arrays, strict=True)):
        length = common_prefix_length(one, other)
        assert row[:length] == other_row[:length]
        assert row[length : length + 1] != other_row[length : length + 1] or length == len(row) == len(other_row)
