"""From samples to micro-batches: every token once, with what belongs to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.learner.packing import MicroBatch, PackFunction, pack_by_length, pack_by_prefix
from agentrl.learner.prefix_tree.tree import build_forest
from agentrl.learner.row_arrays import RowArrays
from agentrl.types import Sample


@st.composite
def rows(draw: st.DrawFn) -> list[Sample]:
    found: list[Sample] = []
    for _ in range(draw(st.integers(1, 12))):
        n = draw(st.integers(2, 20))
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=n - 1, max_size=n - 1))]
        ids = draw(st.lists(st.integers(1, 99), min_size=n, max_size=n))
        starts = (0, *sorted(draw(st.sets(st.integers(1, n - 1), max_size=3))))
        mask = [m * (i not in starts) for i, m in enumerate(mask)]
        logprobs = [float(-i) * m for i, m in zip(ids, mask, strict=True)]
        found.append(Sample(ids, mask, logprobs, [float(len(found))] * n, starts=starts))
    return found


def read(samples: list[Sample]) -> list[RowArrays]:
    return [RowArrays.read(sample) for sample in samples]


def cost_padded(batch: MicroBatch) -> int:
    return len(batch.contexts) * max(map(len, batch.contexts))


def cost_shared(batch: MicroBatch) -> int:
    return len(batch.forest.token_ids)


@pytest.mark.parametrize(("pack", "cost"), [(pack_by_length, cost_padded), (pack_by_prefix, cost_shared)])
@given(given_rows=rows(), budget=st.integers(1, 100))
def test_every_token_is_packed_once_with_what_belongs_to_it(
    pack: PackFunction, cost: Callable[[MicroBatch], int], given_rows: list[Sample], budget: int
) -> None:
    weights = [1.0 + i / 4 for i in range(len(given_rows))]
    seen = []
    arrays = read(given_rows)
    for batch in pack(arrays, weights, budget):
        assert len(batch.rows) == 1 or cost(batch) <= budget
        assert batch.logprobs.tolist() == (-batch.targets).tolist()
        columns = batch.trained, batch.targets, batch.advantages, batch.weights, batch.row_index
        for (context, position), target, advantage, weight, row in zip(*columns, strict=True):
            before, index = batch.contexts[context][:position], batch.forest.token_index[context]
            assert target == batch.contexts[context][position]
            assert batch.forest.token_ids[index].tolist() == batch.contexts[context].tolist()
            assert batch.forest.positions[index].tolist() == list(range(len(index)))
            assert batch.rows[row] is arrays[int(advantage)]
            seen.append((int(advantage), before.tolist(), int(target), float(weight)))
    wanted = [
        (number, row.token_ids[max(s for s in row.starts if s <= position) : position], token, weights[number])
        for number, row in enumerate(given_rows)
        for position, (token, mask) in enumerate(zip(row.token_ids, row.loss_mask, strict=True))
        if mask
    ]
    assert sorted(seen) == sorted(wanted)


@pytest.mark.parametrize(("budget", "lengths"), [(1, [[2], [3], [9]]), (6, [[2, 3], [9]]), (27, [[2, 3, 9]])])
def test_rows_of_similar_length_go_together(budget: int, lengths: list[list[int]]) -> None:
    given_rows = [Sample([1] * n, [0] + [1] * (n - 1), [0.0] * n, [1.0] * n) for n in (9, 2, 3)]
    packed = pack_by_length(read(given_rows), [1.0] * 3, budget)
    assert [[len(r.token_ids) for r in b.rows] for b in packed] == lengths


def test_what_rows_share_counts_once() -> None:
    prompt = list(range(100))
    given_rows = [Sample([*prompt, 100 + n], [0] * 100 + [1], [0.0] * 101, [1.0] * 101) for n in range(20)]
    assert [len(b.rows) for b in pack_by_prefix(read(given_rows), [1.0] * 20, 120)] == [20]
    assert [len(b.rows) for b in pack_by_prefix(read(given_rows), [1.0] * 20, 110)] == [10, 10]
    assert [len(b.rows) for b in pack_by_length(read(given_rows), [1.0] * 20, 120)] == [1] * 20


def test_what_begins_alike_stays_together() -> None:
    """Five groups of 60 or 100 tokens, in micro-batches of 200: no prompt stands twice."""
    rows = []
    for group, answer in enumerate([4, 12, 4, 12, 4]):
        for member in range(10):
            ids = [group] * 40 + [group, 9, member] * (answer // 2)
            rows.append(Sample(ids, [0] * 40 + [1] * (len(ids) - 40), [0.0] * len(ids), [1.0] * len(ids)))
    batches = pack_by_prefix(read(rows), [1.0] * len(rows), 250)
    homes = [{i for i, b in enumerate(batches) for row in b.rows if row.token_ids[0] == g} for g in range(5)]
    assert [len(home) for home in homes] == [1] * 5
    assert sum(len(b.forest.token_ids) for b in batches) == sum(
        len(build_forest(sorted(r.token_ids for r in rows if r.token_ids[0] == g)).token_ids) for g in range(5)
    )


def test_threads_over_a_prefix_compute_it_once() -> None:
    """8 episodes of 4 threads over 2,000 tokens: at most 1.1 times the unique tokens, where one by one it is over 5."""
    given_rows, unique = [], 0
    prefix = [1 + i % 97 for i in range(2000)]
    for episode in range(8):
        ids, starts = list[int](), list[int]()
        for thread in range(4):
            starts.append(len(ids))
            ids += [*prefix, 100 + episode * 4 + thread, *(1 + (episode + i) % 50 for i in range(99))]
        mask = [int(not any(0 <= i - s < len(prefix) for s in starts)) for i in range(len(ids))]
        given_rows.append(Sample(ids, mask, [0.0] * len(ids), [1.0] * len(ids), starts=tuple(starts)))
        unique += 4 * 100
    unique += len(prefix)
    batches = pack_by_prefix(read(given_rows), [1.0] * 8, 8192)
    assert sum(len(b.forest.token_ids) for b in batches) <= 1.1 * unique
    assert sum(len(b.trained) for b in batches) == 8 * 4 * 100
    assert sum(len(row.token_ids) for row in given_rows) > 5 * unique
