"""The ledger of a step: every episode once, and the same numbers for whoever reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import ToolEnv, train
from agentrl.credit import (
    EMPTY,
    FAULT,
    HELD_OUT,
    OUTCOMES,
    RESAMPLED,
    TOO_FEW,
    TRAINED,
    UNSCORED,
    ZERO,
    BatchCut,
    Credit,
    assign_credit,
    record_held_out,
)
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.losses.reduction import reduce_rows
from agentrl.runs import metrics
from agentrl.settings.catalogue import list_own_entries
from agentrl.types import Fault, Group, Observation, Sample, Segment, Stop, Trajectory

ADVANTAGES = dict(list_own_entries("advantage"))
COMPARING = {name: rule for name, rule in ADVANTAGES.items() if "imitation" not in rule.function.__module__}
LOSSES = dict(list_own_entries("loss"))

PROMPT, TAIL = Segment("prompt", (1, 2)), Segment("env", (5,) * 900)
FIRST = Segment("model", (3, 4), (-0.5, -0.25), (0, 0))
SECOND = Segment("model", (6,), (-0.125,), (0,))
GONE = Fault("gone", "it is")


def played(
    reward: float | None = 0.0, stop: Stop = Stop.TERMINATED, fault: Fault | None = None, *segments: Segment
) -> Trajectory:
    row = segments or (PROMPT, FIRST, Segment("env", (5,)), SECOND)
    return Trajectory(0, row, (), stop, {"r": reward}, fault=fault)


def credit_of(*groups: Group, rule: Any = ADVANTAGES["dr_grpo"], loss: str = "dapo", **more: Any) -> Credit:
    return assign_credit(groups, rule, reduce=lambda lengths: reduce_rows(LOSSES[loss], lengths, 10), **more)


def group(*members: Trajectory) -> Group:
    return Group(0, members)


def outcomes(credit: Credit) -> list[list[str]]:
    return [[e.outcome for e in own] for own in credit.entries]


def test_a_sample_is_the_row_with_its_advantage() -> None:
    first, second = credit_of(group(played(1.0), played(0.0))).samples()
    assert first == Sample(
        [1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], [0, 0, -0.5, -0.25, 0, -0.125], [0, 0, 0.5, 0.5, 0, 0.5]
    )
    assert second.advantages == [0, 0, -0.5, -0.5, 0, -0.5]


def test_a_sample_ends_with_its_last_trained_token() -> None:
    """What the world said at last may be longer than any context, and nothing is learned from it."""
    long = played(1.0, Stop.MAX_TURNS, None, PROMPT, FIRST, TAIL)
    first, _ = credit_of(group(long, played(0.0))).samples()
    assert first == Sample([1, 2, 3, 4], [0, 0, 1, 1], [0, 0, -0.5, -0.25], [0, 0, 0.5, 0.5])


def test_a_row_has_the_contexts_in_which_something_was_sampled() -> None:
    """Each sampled token once, behind what it was sampled behind; the last prompt was too long for another turn."""
    anew, more = Segment("prompt", (1, 2, 9)), Segment("env", (5,))
    t = played(
        1.0, Stop.MAX_TOKENS, None, PROMPT, FIRST, more, SECOND, anew, more, SECOND, TAIL, Segment("prompt", (7,))
    )
    assert [len(context) for context in t.contexts] == [4, 4, 1]
    assert (t.turns, t.observed) == (3, [(1, 2), (5,), (5,)])
    first, _ = credit_of(group(t, played(0.0))).samples()
    assert first.contexts == [[1, 2, 3, 4, 5, 6], [1, 2, 9, 5, 6]]
    assert first.loss_mask == [0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 1]
    assert first.logprobs == [0, 0, -0.5, -0.25, 0, -0.125, 0, 0, 0, 0, -0.125]
    assert first.advantages == [0.5 * m for m in first.loss_mask]


def test_each_turn_has_its_own_advantage_and_none_is_anything_else_s() -> None:
    credit = credit_of(group(played(1.0), played(0.0)), rule=lambda groups: [[(0.5, -0.25), (0.0, 0.0)]])
    assert credit.samples()[0].advantages == [0.0, 0.0, 0.5, 0.5, 0.0, -0.25]
    assert outcomes(credit) == [[TRAINED, ZERO]]
    assert credit.rows[0].mean_advantage == 0.125


def test_every_outcome_by_its_name() -> None:
    silent = played(1.0, Stop.MAX_TOKENS, None, PROMPT)
    whole = group(played(1.0), played(0.0), played(0.5), played(1.0, fault=GONE), played(None), silent)
    few = group(played(1.0), played(1.0, fault=GONE), played(None))
    again = group(played(1.0), played(1.0), played(1.0, fault=GONE))

    def rule(groups: Sequence[Sequence[Trajectory]]) -> list[list[float]]:
        return [[t.reward - 0.5 if t.reward == 1.0 else 0.0 for t in g] for g in groups]

    credit = credit_of(whole, few, rule=rule, resampled=[again])
    assert outcomes(credit) == [
        [TRAINED, ZERO, ZERO, FAULT, UNSCORED, EMPTY],
        [TOO_FEW, FAULT, UNSCORED],
        [RESAMPLED, RESAMPLED, FAULT],
    ]
    assert credit.learned == (whole,)
    assert [e.advantage for own in credit.entries[1:] for e in own] == [None] * 6
    assert outcomes(record_held_out([whole])) == [[HELD_OUT] * 6]


def test_masked_stops_count_in_the_mean_and_as_rows_without_tokens() -> None:
    """As TRL's mask_truncated_completions: in the advantages and in means over rows; no token of theirs anywhere."""
    given_group = group(played(1.0), played(0.0, Stop.MAX_TOKENS), played(0.5))
    mask: dict[str, Any] = {"mask_stop_reasons": frozenset({Stop.MAX_TOKENS})}
    credit = credit_of(given_group, **mask)
    assert outcomes(credit) == [[TRAINED, "masked: max_tokens", ZERO]]
    assert [e.advantage for e in credit] == [0.5, -0.5, 0.0]
    assert [len(s.token_ids) for s in credit.samples()] == [6, 0, 6]
    assert credit.weights() == [1 / 6] * 3  # tokens: of two rows
    assert credit_of(given_group, loss="grpo", **mask).weights()[::2] == [1 / 9] * 2  # rows: of three
    assert credit.counts()["masked"] == 1


def test_rows_of_zero_advantage_stay_in_the_denominators() -> None:
    flat, split = group(played(1.0), played(1.0)), group(played(1.0), played(0.0))
    for loss, weight in (("dapo", 1 / 12), ("grpo", 1 / 12), ("dr_grpo", 1 / 40), ("luspo", 1 / 4)):
        assert credit_of(flat, split, loss=loss).weights() == pytest.approx([weight] * 4)


def test_lost_and_resampled_groups_have_no_part_in_the_others_advantages() -> None:
    """``batch`` and ``gdpo`` normalise over the step: what is recorded is what was trained."""
    good, far = group(played(1.0), played(0.0)), group(played(100.0), played(-100.0))
    lost = group(played(50.0), played(0.0, fault=GONE))
    for rule in (ADVANTAGES["batch"], ADVANTAGES["gdpo"]):
        alone = [e.advantage for e in credit_of(good, rule=rule)]
        beside = credit_of(good, lost, rule=rule, resampled=[far])
        assert [e.advantage for e in beside.entries[0]] == alone
        assert len(beside.rows) == 2


def test_a_flat_group_beside_others_is_exactly_flat() -> None:
    """The mean over a step of sums that are 0 is rounded to 5e-17: no advantage."""
    parts = [[(0.3, 1.0), (0.1, 0.0), (0.7, 0.5)], [(0.2, 1.0)] * 3, [(0.9, 0.0), (0.4, 1.0), (0.1, 1.0)]]
    groups = [
        Group(0, tuple(Trajectory(0, (PROMPT, FIRST), (), Stop.TERMINATED, {"a": a, "b": b}) for a, b in own))
        for own in parts
    ]
    for rule in COMPARING.values():
        assert outcomes(credit_of(*groups, rule=rule))[1] == [ZERO] * 3


REWARDS = st.sampled_from([None, 0.0, 0.1, 0.5, 1.0])
MEMBERS = st.builds(
    lambda reward, stop, fault, silent: played(reward, stop, GONE if fault else None, *([PROMPT] if silent else [])),
    REWARDS,
    st.sampled_from([Stop.TERMINATED, Stop.MAX_TOKENS]),
    st.booleans(),
    st.booleans(),
)
GROUPS = st.lists(st.lists(MEMBERS, min_size=1, max_size=5).map(lambda ms: group(*ms)), max_size=4)


@given(GROUPS, GROUPS, st.sampled_from(sorted(ADVANTAGES)), st.sampled_from(sorted(LOSSES)), st.integers(1, 4))
def test_every_episode_has_one_outcome_and_what_goes_with_it(
    groups: Sequence[Group], resampled: Sequence[Group], rule: str, loss: str, min_group_size: int
) -> None:
    credit = credit_of(
        *groups,
        rule=ADVANTAGES[rule],
        loss=loss,
        min_group_size=min_group_size,
        resampled=resampled,
        mask_stop_reasons=frozenset({Stop.MAX_TOKENS}),
    )
    everyone = [t for g in (*groups, *resampled) for t in g]
    assert [e.trajectory for e in credit] == everyone
    counts = credit.counts()
    assert tuple(counts) == OUTCOMES
    assert sum(counts.values()) == len(everyone)
    assert counts[FAULT] == sum(metrics._count_faults(everyone).values())
    told = metrics.credit_metrics(credit)
    assert sum(n for name, n in told.items() if name.startswith("episodes/")) == len(everyone)
    scored = [t for g in groups if len(g.scored) >= min_group_size for t in g.scored]
    assert [id(e.trajectory) for e in credit.rows] == [id(t) for t in scored]
    for e, sample in zip(credit.rows, credit.samples(), strict=True):
        assert sum(sample.loss_mask) == e.trained_tokens
        assert any(sample.advantages) == (e.outcome == TRAINED)
        assert not sample.loss_mask or sample.loss_mask[-1] == 1


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 7), st.sampled_from(sorted(LOSSES)), st.booleans())
def test_a_batch_is_cut_into_even_optimizer_steps(lengths: list[int], steps: int, loss: str, own: bool) -> None:
    cut, whole = BatchCut(steps, "0-1", own), reduce_rows(LOSSES[loss], lengths, 10)
    updates = cut.assign(len(lengths))
    sizes = [updates.count(k) for k in range(steps)]
    assert max(sizes) - min(sizes) <= 1
    assert updates == cut.assign(len(lengths))  # a resumed run cuts as before
    weights = cut.weigh(lengths, updates, lambda rows: reduce_rows(LOSSES[loss], rows, 10))
    if not own:  # the sum over the optimizer steps is that of one, so many times
        assert weights == pytest.approx([steps * w for w in whole])
    elif loss == "bnpo":
        for k in range(steps):
            rows = [(n, w) for n, w, u in zip(lengths, weights, updates, strict=True) if u == k]
            assert sum(n * w for n, w in rows) == pytest.approx(float(any(n for n, _ in rows)))


def test_what_was_said_at_the_end_never_passes_the_models_limit() -> None:
    """GPT-2 knows as many positions as it has: a tail of 900 tokens is no IndexError."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "n_positions": 64}
    policy = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    long = [played(r, Stop.MAX_TURNS, None, PROMPT, FIRST, Segment("env", (5,)), SECOND, TAIL) for r in (1.0, 0.0)]
    short = [played(r, Stop.MAX_TURNS, None, PROMPT, FIRST, Segment("env", (5,)), SECOND) for r in (1.0, 0.0)]
    told = []
    for members in (long, short):
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        learner = Learner(policy, [optimizer], LossSettings(threads=1, packing="padded"))
        credit = credit_of(group(*members))
        told.append(learner.update(credit.samples(), credit.weights()))
    assert told[0] == told[1]


@pytest.mark.parametrize("advantage", ["batch", "gdpo"])
def test_the_recorded_credit_is_what_was_trained(
    advantage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training whose step lost and resampled groups: the learner's rows, the file and the metrics say the same."""
    taught: list[tuple[Sequence[Sample], Sequence[float]]] = []
    update = Learner.update

    def recorded(
        learner: Learner, rows: Sequence[Sample], weights: Any = None, updates: Any = None
    ) -> dict[str, float]:
        taught.append((rows, weights))
        return update(learner, rows, weights, updates)

    monkeypatch.setattr(Learner, "update", recorded)

    class Uneven(ToolEnv):
        """Of three tasks one is paid by chance, one always, and one cannot be scored."""

        async def reset(self, *, seed: int, options: Any = None) -> tuple[Observation, dict[str, Any]]:
            self.kind = seed % 3 if (options or {}).get("split") == "train" else 0
            return self.ask("Say a word."), {}

        async def score(self, trajectory: Trajectory) -> dict[str, float]:
            if self.kind == 2:
                raise RuntimeError("no")
            return {"a": float(sum(trajectory.token_ids) % 3) if self.kind == 0 else 1.0, "b": 0.5}

    rollout = {"tasks_per_step": 4, "group_size": 3, "max_tokens": 6, "dynamic_sampling": True, "max_resamples": 3}
    train(
        Uneven,
        steps=1,
        rollout=rollout,
        learner={"advantage": advantage},
        eval={"every": 0, "final_tasks": 1},
        run={"dir": str(tmp_path / "run")},
    )
    rows = pq.read_table(tmp_path / "run/trajectories/train-000001.parquet").to_pylist()
    ((samples, weights),) = taught
    counted = [r for r in rows if r["weight"] is not None]
    assert [r["weight"] for r in counted] == weights
    for row, sample in zip(counted, samples, strict=True):
        ids = [t for s in row["segments"] for t in s["token_ids"]]
        assert ids[: len(sample.token_ids)] == sample.token_ids
        assert {a for a, m in zip(sample.advantages, sample.loss_mask, strict=True) if m} == {row["advantage"]}
    metrics_of = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (step,) = (line for line in metrics_of if "episodes/trained" in line)
    assert step["scored_rows"] == len(counted)
    for outcome in OUTCOMES:
        assert step[f"episodes/{outcome.replace(' ', '_')}"] == sum(r["credit"] == outcome for r in rows)
    assert sum(r["credit"] == RESAMPLED for r in rows) > 0
    assert sum(r["credit"] == FAULT for r in rows) > 0
    assert sum(v for name, v in step.items() if name.startswith("episodes/")) == len(rows)
