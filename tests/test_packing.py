"""From groups to samples to tensors: nobody is lost, nobody is trained who should not be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.learner.advantage import dr_grpo
from agentrl.learner.packing import pack, samples
from agentrl.types import Fault, Group, Sample, Segment, Stop, Trajectory


def played(reward: float | None, stop: Stop = Stop.TERMINATED, fault: Fault | None = None) -> Trajectory:
    row = (
        Segment("prompt", (1, 2)),
        Segment("model", (3, 4), (-0.5, -0.25), (0, 0)),
        Segment("world", (5,)),
        Segment("model", (6,), (-0.125,), (0,)),
    )
    return Trajectory(0, row, (), stop, {"r": reward}, fault=fault)


def test_a_sample_is_the_row_with_its_advantage() -> None:
    first, second = samples([Group(0, (played(1.0), played(0.0)))], dr_grpo)
    assert first == Sample([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], [0, 0, -0.5, -0.25, 0, -0.125], [0.5] * 6)
    assert second.advantages == [-0.5] * 6


def test_who_is_not_trained() -> None:
    lost = played(1.0, Stop.FAULT, Fault("x", ""))
    silent = Trajectory(0, (Segment("prompt", (1,)),), (), Stop.MAX_TOKENS, {"r": 5.0})
    assert samples([Group(0, (played(1.0), played(1.0)))], dr_grpo) == []
    assert [s.advantages[0] for s in samples([Group(0, (played(1.0), played(0.0), lost))], dr_grpo)] == [0.5, -0.5]
    assert [s.advantages[0] for s in samples([Group(0, (played(1.0), played(0.0), played(None)))], dr_grpo)] == [
        0.5,
        -0.5,
    ]
    assert len(samples([Group(0, (played(1.0), silent))], dr_grpo)) == 1


def test_masked_stops_count_in_the_mean_and_are_not_trained() -> None:
    group = Group(0, (played(1.0), played(0.0, Stop.MAX_TOKENS), played(0.5)))
    assert len(samples([group], dr_grpo)) == 2
    (row,) = samples([group], dr_grpo, frozenset({Stop.MAX_TOKENS}))
    assert row.advantages[0] == 0.5


@st.composite
def rows(draw: st.DrawFn) -> list[Sample]:
    found: list[Sample] = []
    for _ in range(draw(st.integers(1, 12))):
        n = draw(st.integers(2, 20))
        mask = [0, *draw(st.lists(st.integers(0, 1), min_size=n - 1, max_size=n - 1))]
        ids = draw(st.lists(st.integers(1, 99), min_size=n, max_size=n))
        found.append(
            Sample(ids, mask, [float(-i) * m for i, m in zip(ids, mask, strict=True)], [float(len(found))] * n)
        )
    return found


@given(rows(), st.integers(1, 100))
def test_every_token_is_packed_once_with_what_belongs_to_it(given_rows: list[Sample], budget: int) -> None:
    weights = [1.0 + i / 4 for i in range(len(given_rows))]
    seen: list[tuple[tuple[int, ...], float, float]] = []
    for batch in pack(given_rows, weights, budget):
        count, length = batch.token_ids.shape
        assert batch.trained.shape == (count, length)
        assert count == 1 or count * length <= budget
        assert len(batch.logprobs) == len(batch.advantages) == len(batch.weights) == int(batch.trained.sum())
        assert batch.logprobs.tolist() == (-batch.token_ids[batch.trained]).tolist()
        at = 0
        for ids, trained in zip(batch.token_ids.tolist(), batch.trained.tolist(), strict=True):
            n = sum(trained)
            advantages, own = set(batch.advantages[at : at + n].tolist()), set(batch.weights[at : at + n].tolist())
            assert len(advantages) == len(own) == min(n, 1)
            seen.append((tuple(t for t in ids if t), *(advantages or {-1.0}), *(own or {-1.0})))
            at += n
    wanted = [
        (tuple(r.token_ids), r.advantages[0] if any(r.loss_mask) else -1.0, w if any(r.loss_mask) else -1.0)
        for r, w in zip(given_rows, weights, strict=True)
    ]
    assert sorted(seen) == sorted(wanted)


@pytest.mark.parametrize(("budget", "shapes"), [(1, [(1, 2), (1, 3), (1, 9)]), (6, [(2, 3), (1, 9)]), (27, [(3, 9)])])
def test_rows_of_similar_length_go_together(budget: int, shapes: list[tuple[int, int]]) -> None:
    lengths = (9, 2, 3)
    given_rows = [Sample([1] * n, [0] + [1] * (n - 1), [0.0] * n, [1.0] * n) for n in lengths]
    assert [tuple(b.token_ids.shape) for b in pack(given_rows, [1.0] * 3, budget)] == shapes
