"""The view's plain numbers are the learner's: every loss, level and correction, on random tokens."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.learner.advantages.group import ADVANTAGES, EPS
from agentrl.learner.losses.correction import CORRECTIONS
from agentrl.learner.losses.losses import LOSSES, Tokens, off_policy_mask
from agentrl.learner.losses.objective import Objective, compute_token_losses
from agentrl.learner.losses.ratio import LEVELS
from agentrl.view import explain
from agentrl.view.gradient import GradientSettings, bound_ratio, correction_ratios, is_off_policy, logprob_gradients
from agentrl.view.store import Store
from tests.helpers import runs

NATS = st.floats(-3, 3).map(lambda x: round(x, 2) + 0.001)  # no ratio stands exactly at a bound
ROW = st.lists(st.tuples(NATS, st.floats(-2, 2).map(lambda x: round(x, 2))), min_size=1, max_size=12)
BOUNDS = st.tuples(st.sampled_from([None, 0.5, 0.9]), st.sampled_from([None, 1.1, 2.0]))


def tokens(rows: list[list[tuple[float, float]]]) -> Tokens:
    """Of rows of (learner's less engine's logprob, advantage); the policy is the one before the update."""
    old = torch.full((sum(map(len, rows)),), -1.5, dtype=torch.float64)
    sampled = old - torch.tensor([d for row in rows for d, _ in row], dtype=torch.float64)
    advantages = torch.tensor([a for row in rows for _, a in row], dtype=torch.float64)
    index = torch.tensor([i for i, row in enumerate(rows) for _ in row])
    logp = old.clone().requires_grad_()
    return Tokens(logp, old, sampled, advantages, index, len(rows), torch.zeros_like(old))


@pytest.mark.parametrize("name", CORRECTIONS)
@given(rows=st.lists(ROW, min_size=1, max_size=3), bounds=BOUNDS)
def test_corrected_ratios(name: str, rows: list[list[tuple[float, float]]], bounds: Any) -> None:
    t = tokens(rows)
    wanted = CORRECTIONS[name](t.old, t.sampled, t.rows, t.count, bounds).tolist()
    rule = GradientSettings(
        importance_sampling_mode=name, importance_sampling_min=bounds[0], importance_sampling_max=bounds[1]
    )
    found = [bound_ratio(rule, r) for row in rows for r in correction_ratios(name, [d for d, _ in row])]
    assert found == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@given(rows=st.lists(ROW, min_size=1, max_size=3), threshold=st.floats(-1, 1).map(lambda x: round(x, 2)))
def test_rows_that_the_policy_has_left(rows: list[list[tuple[float, float]]], threshold: float) -> None:
    rule = GradientSettings(off_policy_threshold=threshold)
    wanted = off_policy_mask(tokens(rows), threshold).tolist()
    found = [not is_off_policy(rule, [d for d, _ in row], a) for row in rows for _, a in row]
    assert found == [bool(w) for w in wanted]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=40)
@given(
    row=ROW,
    correction=st.sampled_from(sorted(CORRECTIONS)),
    bounds=BOUNDS,
    threshold=st.sampled_from([None, 0.305]),
)
def test_the_slope_of_the_loss(
    loss: str, level: str, row: list[tuple[float, float]], correction: str, bounds: Any, threshold: float | None
) -> None:
    correction = f"token_{correction.partition('_')[2]}" if loss == "vespo" else correction
    shared: dict[str, Any] = {
        "loss": loss,
        "importance_level": level,
        "epsilon_high": 5.0 if loss == "cispo" else 0.28,
        "importance_sampling_mode": correction,
        "importance_sampling_min": bounds[0],
        "importance_sampling_max": bounds[1],
        "off_policy_threshold": threshold,
    }
    t = tokens([row])
    each, _ = compute_token_losses(Objective(**shared), t)
    torch.autograd.backward(each.sum())
    assert t.logp.grad is not None
    found = logprob_gradients(GradientSettings(**shared), [d for d, _ in row], [a for _, a in row])
    assert found == pytest.approx(t.logp.grad.tolist(), rel=1e-6, abs=1e-6)


def test_the_rule_names_what_the_learner_has() -> None:
    assert set(GradientSettings.__dataclass_fields__) < set(Objective.__dataclass_fields__)


@pytest.mark.parametrize("name", sorted(explain.FORMULAS))
@given(rewards=st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=8))
def test_the_formulas_of_advantages(name: str, rewards: list[float]) -> None:
    members = [runs.played(0, [], r) for r in rewards]
    (wanted,) = ADVANTAGES[name]([members])
    found = [explain.FORMULAS[name](r, rewards) for r in rewards]
    assert [value for value, _ in found] == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    assert all(f"{fmean(rewards):.4g}" in text for _, text in found if name != "rloo")


def test_every_advantage_has_words_or_a_formula() -> None:
    from typing import get_args

    from agentrl.settings.schema import AdvantageName

    assert set(get_args(AdvantageName)) == explain.FORMULAS.keys() | explain._DESCRIPTIONS.keys()
    assert explain.EPS == EPS


def test_an_older_runs_settings_may_not_tell(tmp_path: Path) -> None:
    runs.start(tmp_path / "run")
    store = Store(tmp_path / "run")
    store.refresh()
    assert GradientSettings.of(store) is None
