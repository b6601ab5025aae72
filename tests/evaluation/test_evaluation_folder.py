"""An evaluation is a run: it is kept, goes on after a kill to the same result, and every verb about runs opens it."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import agentrl
from agentrl import Env, Reply, Step, Trajectory
from agentrl.errors import UserError
from agentrl.evaluation.folder import CHUNK
from agentrl.evaluation.scope import EvaluationScope, read_scope
from agentrl.testing import decode_text
from tests.helpers.evaluations import Below, evaluated


def contents(folder: Path) -> dict[str, Any]:
    """All that an evaluation says, but for its clocks."""
    found: dict[str, Any] = {p.name: p.read_text() for p in folder.glob("*.*") if p.is_file() and p.name != ".lock"}
    for path in sorted((folder / "trajectories").iterdir()):
        found[path.name] = pq.read_table(path).drop_columns(["timings"]).to_pylist()
    return found


async def test_it_is_a_run_folder_with_every_episode(tmp_path: Path) -> None:
    found, folder = await evaluated(tmp_path / "a")
    assert found.sampled is not None
    assert found.greedy is not None
    assert (found.sampled.tasks, found.sampled.episodes, found.greedy.episodes) == (40, 120, 40)
    assert [r.k for r in found.sampled.passes] == [1, 2, 3]
    files = sorted(p.name for p in (tmp_path / "a" / "trajectories").iterdir())
    assert files == [f"test-{chunk:06d}.parquet" for chunk in range(3)]
    rows = [r for f in files for r in pq.read_table(tmp_path / "a" / "trajectories" / f).to_pylist()]
    assert [(r["task"], r["sample"]) for r in rows] == [(t, m) for t in range(40) for m in range(4)]
    assert {r["temperature"] for r in rows if r["sample"] == 3} == {0.0}
    assert {r["temperature"] for r in rows if r["sample"] < 3} == {1.0}
    assert len({decode_text(r["segments"][1]["token_ids"]) for r in rows[:3]}) > 1  # each trial has dice of its own
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["sampled"]["reward"] == found.sampled.reward
    assert summary["scope"]["sampled"] == 3
    assert folder.complete


async def test_each_chunk_has_a_line_and_the_last_one_everything(tmp_path: Path) -> None:
    found, _ = await evaluated(tmp_path / "a")
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["eval/episodes"]) for line in lines] == [(0, 48), (1, 96), (2, 120)]
    assert found.sampled is not None
    assert lines[-1]["eval/reward"] == found.sampled.reward
    assert lines[-1]["eval/pass_at_3"] >= lines[-1]["eval/reward"] >= lines[-1]["eval/pass_hat_3"]


@pytest.mark.parametrize(
    "kill_at", [77, pytest.param(1, marks=pytest.mark.slow), pytest.param(150, marks=pytest.mark.slow)]
)
async def test_one_that_was_killed_ends_as_one_that_was_not(tmp_path: Path, kill_at: int) -> None:
    words = [sys.executable, "-m", "tests.helpers.evaluations", str(tmp_path / "a"), str(kill_at)]
    died = await anyio.run_process(words, cwd=Path(__file__).parents[2], check=False)
    assert died.returncode == -signal.SIGKILL
    stored = len(list((tmp_path / "a" / "trajectories").glob("test-*.parquet")))
    assert stored < 3
    Below.resets = 0
    await evaluated(tmp_path / "a")
    assert Below.resets == 4 * (40 - stored * CHUNK)  # nothing that was stored is played again
    await evaluated(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


async def test_what_is_complete_is_not_played_again(tmp_path: Path) -> None:
    first, _ = await evaluated(tmp_path / "a")
    before, Below.resets = contents(tmp_path / "a"), 0
    again, _ = await evaluated(tmp_path / "a")
    assert Below.resets == 0
    assert again.sampled == first.sampled
    assert contents(tmp_path / "a") == before


async def test_another_evaluation_is_refused_in_its_folder(tmp_path: Path) -> None:
    await evaluated(tmp_path / "a", EvaluationScope(tasks=4))
    with pytest.raises(UserError, match=r"another one: tasks 4 -> 5; give another --out.*agentrl eval --resume"):
        await evaluated(tmp_path / "a", EvaluationScope(tasks=5))
    with pytest.raises(UserError, match=r"another one: env\.words None -> 'Guess'"):
        await evaluated(tmp_path / "a", EvaluationScope(tasks=4), words="Guess")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="holds a run already; give another --out"):
        await evaluated(tmp_path / "run")


async def test_other_weights_do_not_go_on(tmp_path: Path) -> None:
    await evaluated(tmp_path / "a", EvaluationScope(tasks=20))
    next((tmp_path / "a" / "trajectories").glob("*-000001.parquet")).unlink()
    with pytest.raises(UserError, match="started with other weights of 'dice'"):
        await evaluated(tmp_path / "a", EvaluationScope(tasks=20), identity="other")
    scope = read_scope(tmp_path / "a")
    assert scope is not None
    assert scope.policy == "dice"


async def test_faults_are_no_failures(tmp_path: Path) -> None:
    found, _ = await evaluated(tmp_path / "a", EvaluationScope(tasks=20, sampled=2), broken=5)
    assert found.sampled is not None
    assert (found.sampled.tasks, found.sampled.episodes) == (16, 32)
    assert (found.sampled.faults, found.sampled.faults_by_kind) == (8, {"closed": 8})
    sound, _ = await evaluated(tmp_path / "b", EvaluationScope(tasks=20, sampled=2))
    kept = [r for task, r in sound.rewards.items() if task % 5]
    assert found.sampled.reward == pytest.approx(sum(sum(r) / 2 for r in kept) / len(kept))


async def test_faults_are_tried_again_where_that_is_asked_for(tmp_path: Path) -> None:
    await evaluated(tmp_path / "a", EvaluationScope(tasks=40, sampled=2), broken=30)
    Below.resets = 0
    await evaluated(tmp_path / "a", EvaluationScope(tasks=40, sampled=2), broken=30, retry_faults=True)
    assert Below.resets == 3 * 2 * CHUNK  # tasks 0 and 30 stand in the first two chunks


async def test_where_nothing_could_be_scored_nothing_counts_as_done(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not one of 6 episodes could be scored\. The first fault \(closed\)"):
        await evaluated(tmp_path / "a", EvaluationScope(tasks=3, sampled=2), broken=1)
    Below.resets = 0
    with pytest.raises(UserError, match="not one of 6"):
        await evaluated(tmp_path / "a", EvaluationScope(tasks=3, sampled=2), broken=1)
    assert Below.resets == 9


async def test_a_policy_that_only_samples_or_is_only_greedy(tmp_path: Path) -> None:
    sampled, _ = await evaluated(tmp_path / "a", EvaluationScope(tasks=4, sampled=2, greedy=False))
    greedy, _ = await evaluated(tmp_path / "b", EvaluationScope(tasks=10, sampled=0))
    assert [name for name, _ in sampled.parts] == ["sampled"]
    assert [name for name, _ in greedy.parts] == ["greedy"]
    assert greedy.first.reward == 0.4  # it says 5: below 6, 7, 8 and 9


async def test_a_damaged_chunk_names_the_way_out_which_leads_to_the_same_result(tmp_path: Path) -> None:
    whole, _ = await evaluated(tmp_path / "a")
    chunk = tmp_path / "a" / "trajectories" / "test-000001.parquet"
    chunk.write_bytes(chunk.read_bytes()[:300])
    with pytest.raises(UserError, match=r"test-000001\.parquet cannot be read: .*to roll out its tasks again"):
        await evaluated(tmp_path / "a")
    chunk.unlink()
    again, _ = await evaluated(tmp_path / "a")
    assert again.as_dict() == whole.as_dict()


async def test_a_table_of_something_else_is_no_chunk(tmp_path: Path) -> None:
    await evaluated(tmp_path / "a")
    pq.write_table(pa.table({"price": [1.0]}), tmp_path / "a" / "trajectories" / "test-000001.parquet")
    with pytest.raises(UserError, match=r"test-000001\.parquet is no file of episodes: it has no column 'task'"):
        await evaluated(tmp_path / "a")


@pytest.mark.slow
def test_tasks_are_counted_in_what_is_shared_which_is_opened_once(tmp_path: Path) -> None:
    opened: list[str] = []

    class Counted(Env[Sequence[str]]):
        @classmethod
        @asynccontextmanager
        async def open_shared(cls, **_: Any) -> AsyncIterator[Sequence[str]]:
            opened.append("open")
            yield ["a", "b", "c"]
            opened.append("closed")

        def list_splits(self) -> Sequence[str]:
            return ("train", "test", "hard")

        def count(self, split: str) -> int:
            return len(self.shared[: {"test": 2, "hard": 1}.get(split, 3)])

        async def reset(self, *, seed: int, options: Any = None) -> tuple[str, dict[str, str]]:
            return self.shared[seed], {"split": options["split"]}

        async def step(self, action: Reply) -> Step:
            return Step([], 0.0, True, False, {})

        async def score(self, trajectory: Trajectory) -> dict[str, float]:
            return {"right": 1.0}

    for split, count in (("test", 2), ("hard", 1)):
        short = {"max_tokens": 4}
        measured = agentrl.evaluate(
            Counted, split=split, tasks=8, greedy=True, out=str(tmp_path / split), rollout=short
        )
        assert (measured.tasks, measured.reward) == (count, 1.0)
    assert opened == ["open", "closed"] * 2
    with pytest.raises(UserError, match="split is train, test or hard, not 'hrd'; did you mean 'hard'"):
        agentrl.evaluate(Counted, split="hrd")
