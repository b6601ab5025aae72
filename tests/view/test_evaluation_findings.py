"""An evaluation as the page, a report and the terminal tell of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl import UserError
from agentrl.credit import record_held_out
from agentrl.environments.task_sampler import HELD_OUT, describe_task
from agentrl.evaluation.scope import EvaluationScope, write_scope
from agentrl.types import Fault, Group
from agentrl.view.escaping import shorten_fault
from agentrl.view.explain import explain_episode
from agentrl.view.report import render_report
from agentrl.view.run_cache import RunCache
from agentrl.view.settings_table import EVALUATED, compare_settings
from agentrl.view.store import Store
from tests.helpers import runs
from tests.helpers.evaluations import evaluated

TRACE = (
    "Shop.step of task 3: Traceback (most recent call last):\n  File 'x.py', line 1\n"
    "ValueError: a\n\nDuring handling of the above exception, another exception occurred:\n\n"
    "Traceback (most recent call last):\n  File 'y.py', line 2\nConnectionError: refused\n"
)


def look_at(folder: Path) -> RunCache:
    look = RunCache(Store(folder))
    look.store.refresh()
    return look


def texts(look: RunCache) -> list[str]:
    return [f.text for f in look.findings()]


def unfinished(folder: Path, *groups: Group) -> RunCache:
    """An evaluation of 40 tasks that has come to its first chunk."""
    run = runs.start(folder)
    write_scope(folder, EvaluationScope(tasks=40, sampled=2, greedy=False))
    run.write_trajectories(0, record_held_out(groups), "test")
    return look_at(folder)


async def test_passes_of_several_trials_are_told_with_their_intervals(tmp_path: Path) -> None:
    found, _ = await evaluated(tmp_path / "a")
    assert found.sampled is not None
    rate = next(r for r in found.sampled.passes if r.k == 3)
    told = texts(look_at(tmp_path / "a"))
    assert any(f"pass@3 {rate.any.mean:.3f} ({rate.any.low:.3f} to {rate.any.high:.3f})" in text for text in told)
    assert any(f"pass^3 {rate.all.mean:.3f} ({rate.all.low:.3f} to {rate.all.high:.3f})" in text for text in told)
    assert any("tasks were never done in at least 4 tries each" in text for text in told)


async def test_an_evaluation_shows_the_settings_that_it_heeds_and_no_others(tmp_path: Path) -> None:
    await evaluated(tmp_path / "a")
    rows = {row.name: row for row in compare_settings([Store(tmp_path / "a")])}
    assert {"rollout.temperature", "env.name", "model", "seed", "eval.trials"} <= rows.keys()
    assert not [name for name in rows if name.startswith(("learner.", "run.", "lora.rank")) or name == "steps"]
    assert {"rollout.group_size", "eval.tasks", "eval.final_tasks"}.isdisjoint(rows)
    assert (rows["tasks"].values, rows["tasks"].shown) == (["40"], True)
    assert "endpoint" not in rows
    runs.start(tmp_path / "b")
    both = {row.name: row for row in compare_settings([Store(tmp_path / "a"), Store(tmp_path / "b")])}
    assert both["learner.lr"].used == [False, True]
    assert not both["learner.lr"].differs
    assert both["env.name"].differs
    assert all(both[name].used == [True, False] for name in EVALUATED if name in both)


async def test_an_evaluation_has_no_pairs_and_no_curves_of_its_chunks(tmp_path: Path) -> None:
    await evaluated(tmp_path / "a")
    look = look_at(tmp_path / "a")
    assert look.held_out() is None
    page = render_report(look.store)
    assert "Curves" not in page
    assert "learning rate" not in page
    assert "evaluation of 40 tasks, 3 trials each" in page
    assert "reward, sampled: " in page
    assert "One task, done and not done: task " in page
    assert "The worst" in page


def test_an_evaluation_that_did_not_end_says_how_far_it_came_and_how_it_is_finished(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    group = Group(HELD_OUT, (runs.solved(HELD_OUT), runs.wrong(HELD_OUT)))
    assert "1 of 40 tasks are here; the means follow when all are" in texts(unfinished(folder, group))
    fault = Fault("env_step", TRACE)
    lost = replace(runs.wrong(HELD_OUT), fault=fault)
    told = texts(unfinished(tmp_path / "b", Group(HELD_OUT, (lost, lost))))
    assert told[0].startswith("not one of 2 episodes could be scored; agentrl eval --resume ")
    assert "not one of 2 episodes could be scored" in render_report(look_at(tmp_path / "b").store)
    assert "which are in no mean: env_step, \u201cShop.step of task 3: ConnectionError: refused\u201d" in told[1]


def test_a_run_whose_first_episodes_were_all_lost_says_why(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    lost = [Group(t, (runs.lost(t), runs.lost(t))) for t in range(4)]
    run.write_trajectories(0, record_held_out(lost), "test")
    look = look_at(tmp_path / "run")
    assert any(
        "infrastructure errors ended 8 episodes (100.0%), which are in no mean: tool_timeout" in t for t in texts(look)
    )
    assert "infrastructure errors ended 8 episodes" in render_report(look.store)
    with pytest.raises(UserError, match="has no step yet"):
        render_report(Store(runs.start(tmp_path / "empty").folder))


def test_a_held_out_task_is_named_by_its_place_in_its_split_everywhere(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    task = HELD_OUT + 16
    run.write_trajectories(0, record_held_out([Group(task, (runs.wrong(task), runs.solved(task)))]), "test")
    look = look_at(tmp_path / "run")
    assert explain_episode(look.store, "test-0:0")[0] == "test-0:0 of run: step 0, task 16 of split test, sampled"
    assert explain_episode(look.store, "test-0:1")[0].endswith("task 16 of split test, greedy")
    for query in ("task=16", f"task={task}"):
        _, rows = look.search.rows(query, "")
        assert len(rows) == 2, query
    assert look.store.now.table["task"].to_pylist() == [16, 16]
    assert (describe_task(5 * 2**32, "train"), describe_task(task, "test")) == (
        f"task {5 * 2**32}",
        "task 16 of split test",
    )


def test_a_fault_is_told_by_its_last_line() -> None:
    assert shorten_fault(TRACE) == "Shop.step of task 3: ConnectionError: refused"
    assert shorten_fault("price took more than 30 s") == "price took more than 30 s"
