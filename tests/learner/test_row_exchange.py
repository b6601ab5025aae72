"""Rows on their way to the processes that learn from them: what arrives, and where."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.packing import MicroBatch
from agentrl.learner.row_arrays import RowArrays
from agentrl.learner.row_exchange import RowShare, receive_rows, scatter_rows
from agentrl.learner.updates import order_by_row, unshard
from agentrl.models.kept_tokens import decode_kept
from agentrl.types import RoutedExperts, Sample
from tests.helpers.tiny import VOCABULARY
from tests.learner.test_distributed import build_learner, dissimilar, run_in_two, tiny_policy


def vary(rows: list[Sample]) -> list[Sample]:
    """Of some rows every other token was drawn among a set, of ids or of bits; some have contexts; some were shown."""
    bits = array("i", [-1, *[-1] * -(-VOCABULARY // 32)])
    varied = []
    for number, row in enumerate(rows):
        sets = [array("i", {token, 1, 2, 3}) if number % 2 else bits for token in row.token_ids]
        kept = [one if p % 2 else None for p, one in enumerate(sets)] if number % 3 else ()
        logprobs = [nan if number % 5 == 4 and m else p for p, m in zip(row.logprobs, row.loss_mask, strict=True)]
        starts = (0, 30) if number % 4 == 3 else (0,)
        mask = [m * (p not in starts) for p, m in enumerate(row.loss_mask)]
        varied.append(replace(row, kept=kept, logprobs=logprobs, starts=starts, loss_mask=mask))
    return varied


@st.composite
def updates(draw: st.DrawFn) -> list[list[MicroBatch]]:
    """Micro-batches of some optimizer steps; a step may have none here, and a row no trained token."""

    def row() -> Sample:
        n = draw(st.integers(1, 12))
        mask = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
        ids = draw(st.lists(st.integers(0, 200_000), min_size=n, max_size=n))
        logprobs = draw(st.lists(st.one_of(st.floats(-30, 0, width=32), st.just(nan)), min_size=n, max_size=n))
        starts = (0, *sorted(draw(st.sets(st.integers(1, n), max_size=3)) - {n}))
        one = st.one_of(st.none(), st.lists(st.integers(-1, 9), max_size=4).map(lambda v: array("i", v)))
        kept = draw(st.one_of(st.just(()), st.lists(one, min_size=n, max_size=n)))
        return Sample(ids, mask, logprobs, [draw(st.floats(-3, 3)) for _ in range(n)], kept, starts)

    def batch() -> MicroBatch:
        rows = [row() for _ in range(draw(st.integers(1, 4)))]
        return MicroBatch.read(rows, [draw(st.floats(0, 1)) for _ in rows])

    return [[batch() for _ in range(draw(st.integers(0, 3)))] for _ in range(draw(st.integers(0, 3)))]


def assert_same(one: MicroBatch, other: MicroBatch) -> None:
    for name in ("targets", "logprobs", "advantages", "weights", "row_index"):
        mine, its = getattr(one, name), getattr(other, name)
        assert mine.dtype == its.dtype
        torch.testing.assert_close(mine, its, atol=0.0, rtol=0.0, equal_nan=True)
    for name in ("kept", "trained_counts", "row_weights"):
        assert getattr(one, name) == getattr(other, name), name
    assert [c.tolist() for c in one.contexts] == [c.tolist() for c in other.contexts]
    assert np.array_equal(one.trained, other.trained)
    assert one.keeps_all == other.keeps_all or all(k is None for k in one.kept)


@given(planned=updates())
def test_rows_are_as_they_were_sent(planned: list[list[MicroBatch]]) -> None:
    arrived = RowShare.collect(planned).batches(len(planned))
    assert [len(batches) for batches in arrived] == [len(batches) for batches in planned]
    for mine, its in zip(planned, arrived, strict=True):
        for one, other in zip(mine, its, strict=True):
            assert_same(one, other)


def test_each_process_has_the_rows_of_its_own_micro_batches_alone() -> None:
    planned = [[MicroBatch.read([row]) for row in vary(dissimilar())], [MicroBatch.read(dissimilar()[:3], [0.5] * 3)]]
    arrived: list[Any] = []
    sent: list[torch.Tensor] = []

    def first(group: ProcessGroup) -> Any:
        send = group.send

        def record(tensors: Sequence[torch.Tensor], rank: int) -> None:
            sent.extend(tensors)
            send(tensors, rank)

        group.send = record  # type: ignore[method-assign]
        return scatter_rows(group, planned)

    own = run_in_two(first, lambda group: arrived.extend(receive_rows(group, 2)))
    assert own == [planned[0][::2], planned[1]]  # as they are: no copy of them is made
    assert own[0][0] is planned[0][0]
    for one, other in zip(planned[0][1::2], arrived[0], strict=True):
        assert_same(one, other)
    assert arrived[1] == []
    lengths, *columns = sent
    assert lengths.tolist() == [len(column) for column in columns]
    tokens = sum(len(batch.rows[0].token_ids) for batch in planned[0][1::2])
    assert sum(column.nbytes for column in columns) < 20 * tokens


def test_sets_that_arrived_mark_the_same_tokens() -> None:
    batch = MicroBatch.read(vary(dissimilar())[:7], [1.0] * 7)
    ((arrived,),) = RowShare.collect([[batch]]).batches(1)
    mine, its = (decode_kept(b.kept, VOCABULARY, torch.device("cpu")) for b in (batch, arrived))
    assert not mine.all()
    assert torch.equal(mine, its)


@pytest.mark.parametrize("code", ["B", "H"])
def test_experts_arrive_beside_rows_that_have_none(code: str) -> None:
    rows = dissimilar()[:4]
    for number in (1, 3):
        flat = array(code, [(3 * i + number) % 200 for i in range(4 * (len(rows[number].token_ids) - 1))])
        rows[number] = replace(rows[number], routed_experts=[(0, RoutedExperts(flat, 2, 2))])
    batches = [MicroBatch.read(rows[:3]), MicroBatch.read(rows[3:])]
    (arrived,) = RowShare.collect([batches]).batches(1)
    for one, other in zip(batches, arrived, strict=True):
        assert_same(one, other)
        for mine, its in zip(one.rows, other.rows, strict=True):
            if mine.experts is None:
                assert its.experts is None
                continue
            assert its.experts is not None
            assert its.experts.chosen.dtype == mine.experts.chosen.dtype
            assert np.array_equal(mine.experts.chosen, its.experts.chosen)
            assert np.array_equal(mine.experts.known, its.experts.known)
            assert np.array_equal(mine.keys, its.keys)
    share = RowShare.collect([batches])
    assert share.experts.nbytes == 4 * array(code).itemsize * sum(len(rows[n].token_ids) - 1 for n in (1, 3))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("counts", [(1,), (5, 2), (3, 1, 6)])
def test_what_is_gathered_of_trained_tokens_goes_to_the_row_it_is_of(world: int, counts: tuple[int, ...]) -> None:
    lengths = [2 + n % 3 for n in range(99)]
    samples = [Sample([n] * k, [0] + [1] * (k - 1), [0.0] * k, [1.0] * k) for n, k in enumerate(lengths)]
    rows = iter([RowArrays.read(sample) for sample in samples])
    planned = [[MicroBatch([next(rows), next(rows)], [1.0] * 2) for _ in range(count)] for count in counts]
    groups = [ProcessGroup(rank, world) for rank in range(world)]
    shares = [[batch for batches in planned for batch in group.shard(batches)] for group in groups]
    own = [torch.cat([torch.empty(0), *(batch.targets.float() for batch in share)]) for share in shares]
    batches = [batch for planned_update in planned for batch in planned_update]
    every = [row for batch in batches for row in batch.rows][::-1]
    for row, values in zip(every, order_by_row(every, batches, unshard(groups[0], planned, own)), strict=True):
        assert values.tolist() == row.token_ids[1:].tolist()


def test_lists_of_other_lengths_are_refused() -> None:
    for wrong in ({"logprobs": [0.0] * 2}, {"token_ids": [1] * 4}, {"kept": [None]}):
        sample = replace(Sample([1, 2, 3], [0, 1, 1], [0.0] * 3, [1.0] * 3), **wrong)
        ((name, values),) = wrong.items()
        with pytest.raises(ValueError, match=f"one entry a token; one has .*{len(values)} of {name}"):
            RowArrays.read(sample)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("packing", ["prefix", "padded"])
def test_two_processes_follow_the_rules_of_sampling_of_rows_that_were_sent(packing: str) -> None:
    more = {"packing": packing, "max_tokens_per_microbatch": 150, "repetition_penalty": 1.2, "beta": 0.1}
    rows, cut = vary(dissimilar()), [i % 2 for i in range(45)]
    tiny_policy()
    alone = build_learner(ProcessGroup(), [], **more)
    expected = alone.update(rows, updates=cut)
    learners = []

    def first(group: ProcessGroup) -> dict[str, float]:
        learners.append(build_learner(group, [], **more))
        return learners[0].update(rows, updates=cut)

    metrics = run_in_two(first, lambda group: build_learner(group, [], **more).run_worker())
    assert metrics == pytest.approx(expected, abs=1e-5)
    for mine, whole in zip(learners[0].learned, alone.learned, strict=True):
        assert mine is not None
        assert whole is not None
        torch.testing.assert_close(mine, whole, atol=1e-5, rtol=1e-4)
