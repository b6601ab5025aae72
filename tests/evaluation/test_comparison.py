"""Two evaluations on the same tasks: paired, with what was fixed and what broke, and no winner where there is none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import agentrl
from agentrl.cli import main
from agentrl.credit import record_held_out
from agentrl.errors import UserError
from agentrl.evaluation.comparison import compare
from agentrl.evaluation.scope import EvaluationScope
from agentrl.runs.folder import create_run_folder
from agentrl.runs.reader import parse_episode_id, read_row
from agentrl.types import Group, Trajectory
from tests.helpers import runs
from tests.helpers.evaluations import evaluated

HUNDRED = EvaluationScope(tasks=100, sampled=2)


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def test_tasks_are_fixed_broken_still_wrong_or_still_right() -> None:
    """Greedily one says 5 and the other 2: below 3, 4 and 5 too. Nothing is random in it."""
    await evaluated("a", HUNDRED, skill=5)
    await evaluated("b", HUNDRED, skill=2)
    found = compare("a", "b", greedy=True)
    assert {kind: len(pairs) for kind, pairs in found.pairs.items()} == {
        "fixed": 30,
        "broke": 0,
        "still_wrong": 30,
        "still_right": 40,
    }
    assert found.difference.mean == pytest.approx(0.3)
    assert found.winner == "b"
    back = compare("b", "a", greedy=True)
    assert (len(back.pairs["broke"]), back.winner) == (30, "b")
    pair = found.pairs["fixed"][0]
    for folder, episode, reward in (("a", pair.before_episode, 0.0), ("b", pair.after_episode, 1.0)):
        shown = read_row(Path(folder), parse_episode_id(episode))
        assert (shown["task"], shown["reward"], shown["temperature"]) == (pair.task, reward, 0.0)


async def test_the_same_policy_has_no_clear_winner(capsys: pytest.CaptureFixture[str]) -> None:
    await evaluated("a", HUNDRED)
    await evaluated("b", HUNDRED)
    found = compare("a", "b")
    assert (found.difference.mean, found.winner) == (0.0, None)
    assert found.difference.low < 0 < found.difference.high
    assert main(["compare", "a", "b"]) == 0
    assert "no clear winner: the interval of the difference holds 0" in capsys.readouterr().out


async def test_only_common_tasks_are_compared_and_that_is_said() -> None:
    await evaluated("a", EvaluationScope(tasks=30))
    await evaluated("b", EvaluationScope(tasks=30, first=20), broken=25)
    found = compare("a", "b")
    assert found.difference.tasks == 9
    (first, second) = found.notes
    assert first.startswith("restricted to the 9 tasks that both have")
    assert second == "they differ in more than the policy: env.broken None -> 25"


async def test_what_has_nothing_in_common_is_refused() -> None:
    await evaluated("a", EvaluationScope(tasks=5))
    await evaluated("b", EvaluationScope(tasks=5, first=5))
    await evaluated("c", EvaluationScope(tasks=5), words="Guess below")
    with pytest.raises(UserError, match="no task in common: 5 tasks from 0 to 4 and 5 tasks from 5 to 9"):
        compare("a", "b")
    with pytest.raises(
        UserError, match=r"the same numbers but other words, as task 0 of split test; what differs: env\.words"
    ):
        compare("a", "c")
    with pytest.raises(UserError, match="'nowhere' is no run folder: there is no such folder"):
        compare("a", "nowhere")
    with pytest.raises(UserError, match="'a' is one evaluation: give another one"):
        compare("a")
    made = create_run_folder("shop", "shop", runs.CONFIG.format(steps=1))
    made.write_trajectories(0, record_held_out([Group(7, tried(7, False))]), "test")
    with pytest.raises(UserError, match=r"no task in common: env 'tests\.helpers\.evaluations:Below' and 'shop'"):
        compare("a", "shop")


def tried(task: int, right: bool) -> tuple[Trajectory, Trajectory]:
    """A sampled and a greedy trial."""
    played = runs.solved(task) if right else runs.wrong(task)
    return replace(played, temperature=1.0), replace(runs.solved(task), temperature=0.0)


def test_a_training_is_compared_with_itself_and_with_others() -> None:
    for name, last in (("one", True), ("two", False)):
        made = create_run_folder(name, "shop", runs.CONFIG.format(steps=4))
        for step, right in ((0, False), (2, True), (4, last)):
            groups = [Group(task, tried(task, right)) for task in range(20)]
            made.write_trajectories(step, record_held_out(groups), "test")
        made.close()
    found = agentrl.compare("one")
    assert (found.before, found.after, found.winner) == ("one@0", "one@4", "one@4")
    assert compare("two").winner is None
    assert compare("one", "two").before == "one@4"
    assert compare("one@0", "two@2").winner == "two@2"
    with pytest.raises(UserError, match="'one' was not evaluated at step 3; it was at 0, 2, 4"):
        compare("one@3", "two")


def test_episodes_of_older_runs_have_no_temperature_and_the_second_member_is_greedy() -> None:
    made = create_run_folder("one", "shop", runs.CONFIG.format(steps=4))
    for step in (0, 4):
        made.write_trajectories(step, record_held_out([Group(7, (runs.wrong(7), runs.solved(7)))]), "test")
    assert compare("one").after_mean.mean == 0.0
    assert compare("one", greedy=True).after_mean.mean == 1.0


async def test_by_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    await evaluated("a", HUNDRED, skill=5)
    await evaluated("b", HUNDRED, skill=2)
    assert main(["compare", "a", "b", "--greedy", "true", "--show", "1"]) == 0
    told = capsys.readouterr().out
    assert "difference  +0.300 (+0.2" in told
    assert "b is better" in told
    assert "agentrl explain b test-0:" in told
    assert main(["compare", "a", "b", "a", "--greedy", "true", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["winner"], second["winner"]) == ("b", None)
    assert len(first["pairs"]["fixed"]) == 30
    assert first["difference"]["mean"] == pytest.approx(0.3)


def test_a_trial_passes_from_the_reward_on_that_its_evaluation_says() -> None:
    half = runs.solved(7).with_rewards({"correct": 0.5})
    for name, member in (("a", runs.wrong(7)), ("b", half)):
        made = runs.start(Path(name))
        config = Path(name, "config.toml")
        config.write_text(config.read_text() + "[eval]\npass_at = 0.5\n")
        made.write_trajectories(0, record_held_out([Group(7, (replace(member, temperature=1.0),))]), "test")
    assert (compare("a", "b").pass_at, len(compare("a", "b").pairs["fixed"])) == (0.5, 1)
    assert len(compare("a", "b", pass_at=1.0).pairs["still_wrong"]) == 1
