"""Rows as a forest: every row is a path, nothing that is worth sharing stands twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentrl.learner.forest import WORTH, Forest, grow

LONG = list(range(1000, 1000 + WORTH))


def tokens_of(forest: Forest) -> list[list[int]]:
    return [[forest.token_ids[i] for i in places] for places in forest.places]


@st.composite
def rows(draw: st.DrawFn) -> list[list[int]]:
    """Few different blocks, so that rows share many beginnings, of many lengths."""
    blocks = st.sampled_from([LONG, LONG[:20], [1], [2], [3, 4, 5]])
    lists = st.lists(blocks, min_size=1, max_size=5).map(lambda parts: [t for part in parts for t in part])
    return sorted(draw(st.lists(lists, min_size=1, max_size=12)))


@given(rows())
def test_every_row_is_a_path(given_rows: list[list[int]]) -> None:
    forest = grow(given_rows)
    assert tokens_of(forest) == given_rows
    for places in forest.places:
        assert [forest.positions[i] for i in places] == list(range(len(places)))
    assert sum(forest.lengths) == len(forest.token_ids) == len(forest.positions)
    assert all(forest.lengths)
    assert [n for family in forest.families for n in family.nodes] == list(range(len(forest.lengths)))


@given(rows())
def test_a_node_s_row_passes_its_ancestors_just_before(given_rows: list[list[int]]) -> None:
    forest = grow(given_rows)
    starts = [sum(forest.lengths[:n]) for n in range(len(forest.lengths))]
    for family in forest.families:
        for node in family.nodes:
            path = [i for n in (*family.ancestors, node) for i in range(starts[n], starts[n] + forest.lengths[n])]
            assert any(places[: len(path)] == path for places in forest.places)


def test_the_prompt_of_a_group_stands_once() -> None:
    forest = grow([[*LONG, 1, 2], [*LONG, 3], [*LONG, 3, 4]])
    assert forest.token_ids == [*LONG, 1, 2, 3, 3, 4]
    assert [(f.ancestors, list(f.nodes)) for f in forest.families] == [((), [0]), ((0,), [1, 2, 3])]


def test_the_same_row_twice_stands_once() -> None:
    assert grow([LONG, LONG]).token_ids == LONG
    assert grow([LONG, [*LONG, 7]]).token_ids == [*LONG, 7]


def test_answers_that_begin_alike_share_that_too() -> None:
    call = list(range(40))
    forest = grow(sorted([[*LONG, *call, 50], [*LONG, *call, 51], [*LONG, 60]]))
    assert len(forest.token_ids) == WORTH + 40 + 3


def test_what_is_not_worth_it_is_not_shared() -> None:
    few = list(range(WORTH - 1))
    assert len(grow([[*few, 1], [*few, 2]]).families) == 1
    assert len(grow([[*few, 1], [*few, 2], [*few, 3]]).families) == 2


def test_a_weak_link_does_not_hide_strong_ones() -> None:
    other = [9, *LONG]
    forest = grow(sorted([[*LONG, 1], [*LONG, 2], [*other, 1], [*other, 2]]))
    assert len(forest.token_ids) == 2 * WORTH + 1 + 4
