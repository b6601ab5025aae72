"""What the page tells beside episodes: settings, held-out pairs, tools, calls as they were written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.credit import record_held_out
from agentrl.evaluation.comparison import compare
from agentrl.tools.offered_tools import LONGEST, MOST, OfferedTools
from agentrl.types import Group
from agentrl.view.held_out import pair_held_out
from agentrl.view.run_cache import RunCache
from agentrl.view.settings_table import compare_settings
from agentrl.view.store import Store
from tests.helpers import runs
from tests.helpers.evaluations import evaluated


def opened(folder: Path) -> Store:
    store = Store(folder)
    store.refresh()
    return store


def test_settings_are_told_afork_tools_defaults_and_between_runs(tmp_path: Path) -> None:
    stores = []
    for name, lr in (("a", 0.001), ("b", 0.005)):
        runs.start(tmp_path / name)
        config = tmp_path / name / "config.toml"
        config.write_text(config.read_text().replace("lr = 0.001", f"lr = {lr}") + f'[run]\ndir = "{name}"\n')
        stores.append(Store(tmp_path / name))
    by_name = {row.name: row for row in compare_settings(stores)}
    assert by_name["learner.lr"] == ("learner.lr", "1e-06", ["0.001", "0.005"], [True, True], True, True, True)
    assert by_name["learner.advantage"] == (
        "learner.advantage",
        "grpo",
        ["grpo", "grpo"],
        [True, True],
        False,
        False,
        False,
    )
    assert by_name["env.name"][2:] == (["shop", "shop"], [True, True], False, False, True)
    assert not by_name["run.dir"].differs
    assert next(iter(by_name)) == "env.name"


def test_a_setting_that_a_file_leaves_out_is_its_default(tmp_path: Path) -> None:
    for name, line in (("a", ""), ("b", "[rollout]\ngroup_size = 8\n"), ("c", "[rollout]\ngroup_size = 4\n")):
        runs.start(tmp_path / name)
        with (tmp_path / name / "config.toml").open("a") as config:
            config.write(line)
    a, b, c = (Store(tmp_path / name) for name in "abc")
    (row,) = [r for r in compare_settings([a, b]) if r.name == "rollout.group_size"]
    assert (row.values, row.differs, row.changed) == ([None, "8"], False, False)
    (row,) = [r for r in compare_settings([a, c]) if r.name == "rollout.group_size"]
    assert (row.values, row.differs, row.changed) == ([None, "4"], True, True)


def test_a_folder_without_a_config_has_no_settings(tmp_path: Path) -> None:
    assert compare_settings([Store(tmp_path)]) == []


def test_held_out_tasks_are_paired_first_with_last(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    outcomes = {20: (0, 1), 21: (1, 0), 22: (1, 1), 23: (0, 0)}
    for at, step in enumerate((0, 5)):
        groups = [Group(t, ((runs.wrong, runs.solved)[o[at]](t), runs.solved(t))) for t, o in outcomes.items()]
        groups += [Group(30 + step, (runs.solved(30 + step), runs.solved(30 + step)))]  # of one of the two alone
        run.write_trajectories(step, record_held_out(groups), "test")
    run.write_trajectories(3, record_held_out([Group(20, (runs.wrong(20),))]), "test")
    pairs = pair_held_out(opened(tmp_path / "run").now.table)
    assert pairs is not None
    assert (pairs["before"], pairs["after"]) == (0, 5)
    assert pairs["counts"] == {"broke": 1, "fixed": 1, "still wrong": 1, "still right": 1}
    assert [(p["task"], p["verdict"]) for p in pairs["tasks"]] == [
        (21, "broke"),
        (20, "fixed"),
        (23, "still wrong"),
        (22, "still right"),
    ]
    fixed = pairs["tasks"][1]
    assert (fixed["question"], fixed["expected"]) == ("What do 20 hats cost?", "140")
    assert fixed["before"] == {"reward": 0.0, "greedy": 1.0, "id": "test-0:0", "answer": "I do not know."}
    assert pairs["difference"]["mean"] == 0.0
    assert pairs["difference"]["low"] < 0 < pairs["difference"]["high"]


def test_the_page_pairs_as_the_command_does(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    for at, step in enumerate((0, 5)):
        groups = []
        for task in range(20, 40):
            member = (runs.wrong, runs.solved)[(task >> at) & 1](task)
            groups.append(Group(task, (member, runs.solved(task))))
        run.write_trajectories(step, record_held_out(groups), "test")
        run.log({"step": step, "eval/reward": 0.5, "eval/greedy_reward": 1.0})
    told = compare(str(tmp_path / "run"))
    pairs = pair_held_out(opened(tmp_path / "run").now.table)
    assert pairs is not None
    for kind, own in told.pairs.items():
        shown = sorted(p["task"] for p in pairs["tasks"] if p["verdict"] == kind.replace("_", " "))
        assert shown == sorted(pair.task for pair in own)
    assert pairs["difference"] == {name: getattr(told.difference, name) for name in ("mean", "low", "high")}


def test_a_task_is_right_by_most_of_its_trials_for_the_page_and_the_command(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    for step, solved in ((0, 1), (5, 2)):
        sampled = [(runs.solved if n < solved else runs.wrong)(20) for n in range(3)]
        members = [*(replace(t, temperature=1.0) for t in sampled), replace(runs.wrong(20), temperature=0.0)]
        run.write_trajectories(step, record_held_out([Group(20, tuple(members))]), "test")
        run.log({"step": step, "eval/reward": 0.5, "eval/greedy_reward": 0.0})
    told = compare(str(tmp_path / "run"))
    pairs = pair_held_out(opened(tmp_path / "run").now.table)
    assert pairs is not None
    assert [p.task for p in told.pairs["fixed"]] == [20]
    (pair,) = pairs["tasks"]
    assert (pair["verdict"], pair["before"]["id"], pair["after"]["id"]) == ("fixed", "test-0:1", "test-5:0")


def test_evaluations_with_another_number_of_trials_are_paired_by_their_sampled_ones(tmp_path: Path) -> None:
    """A run that goes on may have other trials; the greedy episode of before was then taken for a sampled one."""
    run = runs.start(tmp_path / "run")
    for step, trials in ((0, 1), (5, 3)):
        groups = []
        for task in range(20, 24):
            sampled = [replace(runs.wrong(task), temperature=1.0)] * trials
            groups.append(Group(task, (*sampled, replace(runs.solved(task), temperature=0.0))))
        run.write_trajectories(step, record_held_out(groups), "test")
        run.log({"step": step, "eval/reward": 0.0, "eval/greedy_reward": 1.0})
    with (tmp_path / "run" / "config.toml").open("a") as config:
        config.write("[eval]\ntrials = 3\n")
    pairs, told = RunCache(opened(tmp_path / "run")).held_out(), compare(str(tmp_path / "run"))
    assert pairs is not None
    assert pairs["counts"]["still wrong"] == 4
    assert {p["before"]["reward"] for p in pairs["tasks"]} == {0.0}
    assert {p["before"]["greedy"] for p in pairs["tasks"]} == {p["after"]["greedy"] for p in pairs["tasks"]} == {1.0}
    assert pairs["difference"]["mean"] == told.difference.mean == 0.0


def test_an_episode_that_was_lost_is_in_no_verdict(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    for step, played in ((0, runs.lost), (5, runs.solved)):
        run.write_trajectories(step, record_held_out([Group(7, (played(7), runs.solved(7)))]), "test")
    pairs = pair_held_out(opened(tmp_path / "run").now.table)
    assert pairs is not None
    assert [p["verdict"] for p in pairs["tasks"]] == ["not scored"]
    assert pairs["difference"] is None


def test_one_evaluation_is_no_pair(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    run.write_trajectories(0, record_held_out([Group(7, (runs.wrong(7), runs.solved(7)))]), "test")
    assert pair_held_out(opened(tmp_path / "run").now.table) is None
    assert pair_held_out(Store(tmp_path).now.table) is None


def test_each_list_of_tools_is_kept_once_and_not_without_end(tmp_path: Path) -> None:
    offered, run = OfferedTools(), runs.start(tmp_path / "run")
    for _ in range(3):
        offered.add([{"type": "function", "function": {"name": "price"}}])
    run.write_tools(offered)
    assert opened(tmp_path / "run").tools() == [[{"type": "function", "function": {"name": "price"}}]]
    written = (tmp_path / "run/tools.json").stat().st_mtime_ns
    run.write_tools(offered)
    assert (tmp_path / "run/tools.json").stat().st_mtime_ns == written
    for number in range(100):
        offered.add([{"function": {"name": f"t{number}-{k}", "description": "x" * 10_000}} for k in range(50)])
    assert len(offered.lists) == MOST
    assert len(offered.dump()) < (MOST + 1) * LONGEST


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"a": 1}', "[[1, {}]]"])
def test_tools_that_cannot_be_read_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "tools.json").write_text(text)
    assert all(isinstance(tool, dict) for tools in Store(tmp_path).tools() for tool in tools)


async def test_an_evaluation_is_called_one_and_tells_its_means(tmp_path: Path) -> None:
    found, _ = await evaluated(tmp_path / "a")
    look = RunCache(Store(tmp_path / "a"))
    look.store.refresh()
    assert look.summary()["evaluates"] == "evaluation of 40 tasks, 3 trials each"
    sampled, greedy = (f.text for f in look.findings() if f.text.startswith("reward, "))
    assert found.sampled is not None
    assert sampled.startswith(f"reward, sampled: {found.sampled.reward:.3f} (95 % interval ")
    assert sampled.endswith(" over 40 tasks, 120 episodes")
    assert greedy.endswith(" over 40 tasks, 40 episodes")
    training = runs.broken(tmp_path / "b")
    assert RunCache(Store(training)).summary()["evaluates"] == ""


def test_calls_that_branches_share_are_counted_once(tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run")
    trunk = runs.solved(20)
    members = (trunk, replace(trunk, shared_turns=1), replace(trunk, shared_turns=2))  # its call is in turn 0
    run.write_trajectories(1, record_held_out([Group(20, members)]))
    assert RunCache(opened(tmp_path / "run")).failures()["tools"][0]["calls"] == 1
