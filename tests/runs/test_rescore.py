"""Stored episodes come back as they were, are scored anew, and are played again from their record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pyarrow.parquet as pq
import pytest

from agentrl import AgentEnv, EnvSpec, ToolEnv, ToolError, Trajectory, UserError, cli, tool
from agentrl.cli.rescore import _groups
from agentrl.rewards.functions import per_episode, resolve_rewards
from agentrl.rollout.rollout import Rollout
from agentrl.runs import reader
from agentrl.runs.folder import create_run_folder
from agentrl.runs.replay import Replay, replay_episode
from agentrl.runs.rescore import RescoredEpisode, rescore_episodes
from agentrl.testing import ByteRenderer, ScriptedEngine, call
from agentrl.types import Fault, Group, Observation, Segment, Stop, find_failed_answers
from tests.helpers.runs import credited

asked: list[str] = []


class Counter(ToolEnv):
    """Counts; what it is worth is the count."""

    goal = 2
    reward_weights = {"said": 0.5}

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self.sum = 0
        return self.ask(f"count to {seed}"), {"wanted": seed}

    @tool
    async def add(self, n: int) -> int:
        """Add to the count."""
        asked.append(str(n))
        self.sum += n
        return self.sum

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"counted": float(self.sum == self.goal), "said": float("done" in trajectory.answer)}


def polite(completions: list[Any], wanted: list[int], **_: Any) -> list[float]:
    return [float("done" in completions[0][-1]["content"]) * wanted[0]]


def wrong(prompts: list[Any], **_: Any) -> list[float]:
    return [1.0, 2.0]


async def play(*script: str, task: int = 2) -> tuple[Trajectory, Rollout]:
    spec = EnvSpec(Counter)
    async with spec.open():
        rollout = Rollout(spec, ScriptedEngine(script), ByteRenderer())
        return (await rollout.group(task, 1)).trajectories[0], rollout


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with two episodes of ``Counter`` and one that an infrastructure error ended."""
    good, _ = anyio.run(lambda: play(call("add", n=1), call("add", n=1), "done"))
    bad, _ = anyio.run(lambda: play("no", task=3))
    lost = Trajectory(4, (Segment("prompt", (1,)),), (), Stop.FAULT, fault=Fault("gone", "it is"))
    made = create_run_folder(str(tmp_path / "r"), "x", f'[env]\nname = "{Path(__file__).as_posix()}:Counter"\n')
    made.write_trajectories(3, credited([Group(2, (good, bad, lost))], [(0.5, -0.5, 0.0)]))
    made.close()
    asked.clear()
    return tmp_path / "r"


def test_an_episode_comes_back_as_it_was(run: Path) -> None:
    good, _ = anyio.run(lambda: play(call("add", n=1), call("add", n=1), "done"))
    back = reader.build_trajectory(reader.read_row(run, reader.parse_episode_id("3:0")))
    for name in ("task", "messages", "stop", "rewards", "token_ids", "loss_mask", "versions", "fault", "answer"):
        assert getattr(back, name) == getattr(good, name), name
    assert [(c.turn, c.name, c.status) for c in back.calls] == [(0, "add", "ok"), (1, "add", "ok")]
    assert (back.weights, back.reward) == ({"said": 0.5}, 1.5)
    assert back.logprobs == pytest.approx(good.logprobs)
    assert reader.build_trajectory(reader.read_row(run, reader.parse_episode_id("train-3:2"))).fault == Fault(
        "gone", "it is"
    )


def test_an_episode_that_another_version_wrote_is_a_sentence(run: Path) -> None:
    path = run / "trajectories" / "train-000003.parquet"
    pq.write_table(pq.read_table(path).replace_schema_metadata({"agentrl_trajectories": "5"}), path)
    with pytest.raises(UserError, match=r"train-000003.parquet was written by another agentrl, version 5 of .*: read"):
        reader.read_row(run, reader.parse_episode_id("3:0"))
    from agentrl.view.store import Store

    store = Store(run)
    store.refresh()
    (why,) = store.problems.values()
    assert why.startswith("written by another agentrl, version 5 of trajectories; this is ")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("3", "an episode is SPLIT-STEP:ROW, such as train-3:17 or 3:17, not '3'"),
        ("../x-3:1", "an episode is SPLIT-STEP:ROW"),
        ("4:0", "has no train-000004.parquet"),
        ("3:9", "train-000003.parquet has the episodes 0 to 2, not 9"),
    ],
)
def test_an_episode_that_is_not_there_is_a_sentence(run: Path, name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        reader.read_row(run, reader.parse_episode_id(name))


class Left(AgentEnv):
    """Scores a file that an agent leaves."""

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        return "leave it", {"wanted": 1.0}

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"left": float(await self.read_file("it") is not None)}


def test_what_an_agent_left_is_gone_and_other_rewards_are_of_what_was_said() -> None:
    done, _ = anyio.run(lambda: play("done"))

    async def rescore(rewards: Any) -> list[RescoredEpisode]:
        async with EnvSpec(Left).open() as spec:
            return [r async for r in rescore_episodes(spec, [[(reader.EpisodeId("train", 3, 0), done)]], rewards)]

    with pytest.raises(UserError, match=r"env 'Left' scores what an agent left, .* is gone with the episode: give"):
        anyio.run(rescore, None)
    assert [r.reward for r in anyio.run(rescore, {"polite": polite})] == [1.0]


def scored(run: Path, rewards: Any = None, act: bool = False) -> list[RescoredEpisode]:
    async def main() -> list[RescoredEpisode]:
        episodes = [
            (reader.EpisodeId("train", 3, n), reader.build_trajectory(r))
            for n, r in reader.read_rows(run / "trajectories" / "train-000003.parquet")
        ]
        async with EnvSpec(Counter).open() as spec:
            found = [r async for r in rescore_episodes(spec, [[e] for e in episodes], rewards, act=act)]
        return sorted(found, key=lambda r: r.where)

    return anyio.run(main)


def test_episodes_are_scored_by_the_environment_as_it_is_now(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    still, acted = scored(run), scored(run, act=True)
    assert [r.rewards for r in still] == [{"counted": 0.0, "said": 1.0}, {"counted": 0.0, "said": 0.0}]
    assert [r.rewards for r in acted] == [{"counted": 1.0, "said": 1.0}, {"counted": 0.0, "said": 0.0}]
    assert asked == ["1", "1"]
    monkeypatch.setattr(Counter, "goal", 0)
    assert [(r.before.reward, r.reward) for r in scored(run)] == [(1.5, 1.5), (0.0, 1.0)]


def test_episodes_are_scored_by_functions(run: Path) -> None:
    found = scored(run, resolve_rewards([polite]))
    assert [r.rewards for r in found] == [{"polite": 2.0}, {"polite": 0.0}]
    with pytest.raises(UserError, match="reward 'wrong' returned"):
        scored(run, resolve_rewards([wrong]))


def test_an_episode_that_cannot_be_scored_says_why(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Counter, trajectory: Trajectory) -> dict[str, float]:
        raise KeyError("x")

    monkeypatch.setattr(Counter, "score", broken)
    assert [(r.rewards, r.why) for r in scored(run)] == [(None, "KeyError: 'x'")] * 2


def test_rescore_from_the_command_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run / "new.parquet"
    assert cli.main(["rescore", str(run), "--rewards", f"{Path(__file__)}:polite", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "2 episodes of" in told
    assert "polite" in told
    rows = pq.read_table(out).to_pylist()
    assert [(r["row"], r["reward_before"], r["reward"]) for r in rows] == [(0, 1.5, 2.0), (1, 0.0, 0.0)]
    assert cli.main(["rescore", str(run), "--out", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert cli.main(["rescore", str(run / "trajectories")]) == 2
    assert "is no run folder" in capsys.readouterr().err
    assert cli.main(["rescore", str(run), "--split", "tst"]) == 2
    assert "holds no episodes of split tst" in capsys.readouterr().err


async def again(before: Trajectory, turns: int | None = None, live: bool = True, *then: str) -> Replay:
    spec = EnvSpec(Counter)
    async with spec.open():
        engine = ScriptedEngine(then) if then else None
        rollout = Rollout(spec, ScriptedEngine(["never"]), ByteRenderer())
        return await replay_episode(rollout, before, turns=turns, live=live, then=engine)


def test_a_replay_is_the_same_and_calls_no_tool() -> None:
    before, _ = anyio.run(lambda: play(call("add", n=1), call("mul", n=1), call("add", n="x"), "done"))
    asked.clear()
    found = anyio.run(lambda: again(before))
    assert found.after.token_ids == before.token_ids
    assert found.after.messages == before.messages
    assert (asked, found.called) == ([], 0)
    assert found.differs == ""


class Logs(Counter):
    """Its log holds lines that begin as the answer to a failed call does."""

    @tool
    async def read(self, line: int) -> str:
        """Read a line of the log."""
        if line > 1:
            raise ToolError("disk full")
        return "error: disk full"


@pytest.mark.parametrize("script", [[1], [1, 2], [2, 1]])
def test_a_good_answer_that_begins_as_a_refusal_is_replayed_as_an_answer(script: list[int], tmp_path: Path) -> None:
    async def go() -> tuple[Trajectory, Replay]:
        async with EnvSpec(Logs).open() as spec:
            engine = ScriptedEngine([*(call("read", line=line) for line in script), "done"])
            rollout = Rollout(spec, engine, ByteRenderer())
            (before,) = (await rollout.group(2, 1)).trajectories
            made = create_run_folder(str(tmp_path / "r"), "x", "")
            made.write_trajectories(1, credited([Group(2, (before,))], [(0.0,)]))
            made.close()
            back = reader.build_trajectory(reader.read_row(tmp_path / "r", reader.parse_episode_id("1:0")))
            return before, await replay_episode(rollout, back)

    before, found = anyio.run(go)
    statuses = ["ok" if line == 1 else "tool" for line in script]
    assert [c.status for c in before.calls] == [c.status for c in found.after.calls] == statuses
    assert found.after.messages == before.messages
    assert found.differs == ""


def test_an_older_record_without_verdicts_is_read_by_its_texts() -> None:
    before, _ = anyio.run(lambda: play(call("add", n=1), call("mul", n=1), "done"))
    old = replace(before, messages=tuple({k: v for k, v in m.items() if k != "is_error"} for m in before.messages))  # type: ignore[misc]
    assert find_failed_answers(old.messages, True) == find_failed_answers(before.messages, True)
    assert anyio.run(lambda: again(old)).after.messages == before.messages


def test_another_policy_goes_on_from_a_turn() -> None:
    before, _ = anyio.run(lambda: play(call("add", n=1), call("add", n=1), "done"))
    asked.clear()
    found = anyio.run(lambda: again(before, 1, True, call("add", n=5), "I am done"))
    assert asked == ["5"], "what is on record was not called again"
    assert found.called == 1
    assert found.after.messages[:3] == before.messages[:3]
    assert found.after.answer == "I am done"
    assert found.differs.startswith("turn 1 differs from its token")


def test_what_is_not_on_record_ends_the_episode_where_nothing_is_live() -> None:
    before, _ = anyio.run(lambda: play(call("add", n=1), "done"))
    found = anyio.run(lambda: again(before, 1, False, call("add", n=7), "done"))
    assert found.after.fault is not None
    assert found.after.fault.kind == "not_recorded"


def test_an_environment_that_changed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before, _ = anyio.run(lambda: play(call("add", n=1), "done"))
    monkeypatch.setattr(Counter, "system_prompt", "Be brief.")
    assert anyio.run(lambda: again(before)).differs == "the prompt differs from its token 0 on"
    monkeypatch.undo()
    monkeypatch.setattr(Counter, "goal", 0)
    assert anyio.run(lambda: again(before)).differs.startswith("the same tokens, but other rewards")


def count(completions: list[Any], log_metric: Any, **_: Any) -> list[float]:
    log_metric("members", len(completions))
    return [float(len(completions))] * len(completions)


@per_episode
def own(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(completions))] * len(completions)


@pytest.mark.parametrize(("split", "together"), [("train", [2, 2, 3, 3, 3, 1]), ("test", [1] * 6)])
def test_groups_are_compared_anew_as_they_were_trained(tmp_path: Path, split: str, together: list[int]) -> None:
    """A task dealt twice is two groups; the episodes of an evaluation are compared with none."""
    good, _ = anyio.run(lambda: play("done"))
    lost = Trajectory(2, (Segment("prompt", (1,)),), (), Stop.FAULT, fault=Fault("gone", "it is"))
    made = create_run_folder(str(tmp_path / "r"), "x", "")
    groups = [Group(2, (good, lost, good)), Group(2, (good,) * 3), Group(3, (replace(good, task=3),))]
    credit = credited(groups, [[0.0] * len(g.trajectories) for g in groups])
    made.write_trajectories(3, credit, split)
    made.close()

    async def main() -> list[RescoredEpisode]:
        async with EnvSpec(Counter).open() as spec:
            found = rescore_episodes(
                spec, _groups(reader.list_files(tmp_path / "r"), []), resolve_rewards([count, own])
            )
            return sorted([r async for r in found], key=lambda r: r.where)

    assert [r.rewards for r in anyio.run(main)] == [{"own": 1.0, "count": float(n)} for n in together]
