"""docs/metrics.md is up to date, and knows every number of a real training and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agentrl import ContractError, loss
from agentrl.runs.metric_catalogue import (
    EVALUATION,
    STEP,
    SUMMARY,
    check_loss_metrics,
    find_metric,
    format_page,
    list_loss_metrics,
)
from agentrl.settings.catalogue import BoundEntry

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_catalogue_says() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert page == format_page(), "python -m agentrl.runs.metric_catalogue > docs/metrics.md"


def test_each_metric_is_made_where_the_page_says() -> None:
    """The last part of its name that is no placeholder stands in that module, or is put together there."""
    for metric in (*STEP, *EVALUATION, *SUMMARY, *(d for d, _ in list_loss_metrics())):
        source = (ROOT / metric.made).read_text(encoding="utf-8")
        words = [w for w in re.split(r"[/_.]", metric.name.removeprefix("eval/").removeprefix("greedy_")) if w]
        known = [w for w in words if not w.isupper()]
        assert not known or any(word in source for word in known), metric


@pytest.mark.parametrize("name", ["loss", "entropy", "step", "reward", "time/learn", "eval/mine"])
def test_a_loss_does_not_declare_a_name_that_a_run_logs_itself(name: str) -> None:
    def foreign(declared: str) -> BoundEntry:
        return BoundEntry("mine.py:f", loss(metrics={declared: "its own"})(lambda t, log_ratio: log_ratio), {})

    check_loss_metrics(foreign("mine/gate"))
    with pytest.raises(ContractError, match=f"loss 'mine.py:f' declares the metric '{name}', which agentrl logs"):
        check_loss_metrics(foreign(name))


def test_no_metric_is_described_twice() -> None:
    for metrics in (STEP, EVALUATION, SUMMARY):
        assert len({m.name for m in metrics}) == len(metrics)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dapo", "cispo", "vespo"])
def test_a_trainings_every_number_is_described(loss: str, tmp_path: Path) -> None:
    import agentrl

    agentrl.train(
        "math-tools",
        steps=1,
        verbose=False,
        rollout={"tasks_per_step": 2, "group_size": 4, "max_tokens": 32},
        learner={"loss": loss, "beta": 0.1},
        eval={"every": 0, "final_tasks": 1, "trials": 2},
        run={"dir": str(tmp_path / "run")},
    )
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        evaluation = "eval/runtime" in row
        assert [name for name in row if find_metric(name, evaluation=evaluation) is None] == []
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert [m.name for m in SUMMARY if m.name not in summary] == []
    declared = {d.name for d, owners in list_loss_metrics() if loss in owners}
    assert declared <= set().union(*rows)
    names = {name for row in rows for name in row}
    assert [m.name for m in STEP if not any(c.isupper() for c in m.name) and m.name not in names] == [
        "faults/provoked",
        "oversample/cancelled",
        "aux_loss",  # of mixtures of experts
        "router/replay_disagreement",
        "router/replayed",
        "stage",  # of runs that have several
    ]
