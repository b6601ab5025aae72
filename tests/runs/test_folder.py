"""The run folder: what other programs can read, and where it may be."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agentrl import UserError
from agentrl.credit import record_held_out
from agentrl.runs.folder import create_run_folder
from agentrl.runs.writer import SCHEMA, LearnedTokens
from agentrl.types import CallRecord, Fault, Group, Segment, Stop, Trajectory
from tests.helpers.runs import credited


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


GOOD = Trajectory(
    task=2**40,
    segments=(Segment("prompt", (1, 2)), Segment("model", (3, 4), (-0.5, -0.25), (7, 7)), Segment("env", (5,))),
    messages=({"role": "user", "content": "Köln?"}, {"role": "assistant", "content": "1", "tool_calls": []}),
    stop=Stop.MAX_TURNS,
    rewards={"correct": 1.0, "style": None},
    weights={"style": 0.5},
    step_rewards=(0.0, 0.5),
    timings={"reset": 0.25, "total": 1.5},
    calls=(CallRecord(0, "search", "ok", 0.125, (0, 2)),),
)
LOST = Trajectory(
    task=3,
    segments=(Segment("prompt", (1,)),),
    messages=({"role": "user", "content": "half \ud800"},),
    stop=Stop.FAULT,
    calls=(CallRecord(0, "\udcff", "tool", 0.0),),
    fault=Fault("env_step", "it said \ud800"),
)


def test_trajectories_are_rows_that_pyarrow_reads() -> None:
    run = create_run_folder("runs/a", "shop", "")
    run.write_trajectories(3, credited([Group(2**40, (GOOD, LOST))], [(0.5, 0.0)]))
    table = pq.read_table("runs/a/trajectories/train-000003.parquet")
    assert table.schema.equals(SCHEMA)
    assert table.schema.metadata[b"agentrl_trajectories"] == b"7"
    good, lost = table.to_pylist()
    assert (good["step"], good["split"], good["task"], good["sample"]) == (3, "train", 2**40, 0)
    assert (good["reward"], good["advantage"], good["stop"], good["fault"]) == (1.0, 0.5, "max_turns", None)
    assert good["rewards"] == [{"name": "correct", "value": 1.0}, {"name": "style", "value": None}]
    assert good["weights"] == [{"name": "style", "value": 0.5}]
    assert good["advantages"] == [0.5]
    assert (lost["advantage"], lost["advantages"]) == (None, [])
    assert (good["credit"], good["weight"]) == ("trained", 0.5)
    assert (lost["credit"], lost["weight"]) == ("fault", None)
    assert good["step_rewards"] == [0.0, 0.5]
    assert good["timings"] == [{"name": "reset", "value": 0.25}, {"name": "total", "value": 1.5}]
    names = ("author", "token_ids", "logprobs", "versions", "learner_logprobs")
    assert [tuple(s[n] for n in names) for s in good["segments"]] == [
        ("prompt", [1, 2], None, None, None),
        ("model", [3, 4], [-0.5, -0.25], [7, 7], None),
        ("env", [5], None, None, None),
    ]
    assert json.loads(good["messages"])[0] == {"role": "user", "content": "Köln?"}
    assert good["calls"] == [{"turn": 0, "name": "search", "status": "ok", "seconds": 0.125, "start": 0, "end": 2}]
    assert (lost["sample"], lost["reward"], lost["stop"], lost["fault"]) == (1, None, "fault", "env_step")
    assert (lost["fault_message"], lost["calls"][0]["name"]) == ("it said ?", "?")
    assert json.loads(lost["messages"]) == [{"role": "user", "content": "half ?"}]


def test_the_learners_logprobs_stand_beside_the_engines() -> None:
    run = create_run_folder("runs/a", "shop", "")
    turns = (*GOOD.segments, Segment("model", (6,), (-2.0,), (8,)))
    credit = credited([Group(2**40, (replace(GOOD, segments=turns), LOST))], [(0.5, 0.0)])
    tokens = LearnedTokens([-0.5, -0.125, -1.5], [0.5, 0.25, -0.125], [1.0, 2.0, 0.0])
    run.write_trajectories(3, credit, learned=[[tokens, None]])
    good, lost = pq.read_table("runs/a/trajectories/train-000003.parquet").to_pylist()
    assert [s["learner_logprobs"] for s in good["segments"]] == [None, [-0.5, -0.125], None, [-1.5]]
    assert [s["loss_gradients"] for s in good["segments"]] == [None, [0.5, 0.25], None, [-0.125]]
    assert [s["corrections"] for s in good["segments"]] == [None, [1.0, 2.0], None, [0.0]]
    assert [s["learner_logprobs"] for s in lost["segments"]] == [None]


def test_trajectories_are_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    run = create_run_folder("runs/a", "shop", "")
    for step in (1, 2):
        run.write_trajectories(step, credited([Group(2**40, (GOOD, LOST))], [(0.5, 0.0)]))
    files = sorted(str(p) for p in Path("runs/a/trajectories").glob("*.parquet"))
    rows = datasets.Dataset.from_parquet(files, cache_dir=str(tmp_path / "cache"))
    assert rows["step"][:] == [1, 1, 2, 2]
    assert rows[0]["segments"][1]["token_ids"] == [3, 4]


def test_no_half_written_file_is_left_under_the_name() -> None:
    run = create_run_folder("runs/a", "shop", "")
    with pytest.raises(ValueError, match="zip"):
        run.write_trajectories(1, record_held_out([Group(3, (GOOD, LOST))]), learned=[[None]])
    run.write_trajectories(1, record_held_out([]), split="test")
    assert [p.name for p in Path("runs/a/trajectories").iterdir()] == ["test-000001.parquet"]


def test_metrics_are_lines_of_strict_json() -> None:
    run = create_run_folder("runs/a", "shop", "")
    run.log({"step": 1, "reward": 0.5})
    run.log({"step": 2, "grad_norm": math.nan, "loss": -math.inf})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    lines = Path("runs/a/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse) for line in lines] == [
        {"step": 1, "reward": 0.5},
        {"step": 2, "grad_norm": None, "loss": None},
    ]


def test_a_summary_is_strict_json() -> None:
    numbers = {
        "difference": {"mean": math.nan, "tasks": 0},
        "passes": [{"interval": [math.inf, 0.5]}],
        "pair": (-math.inf,),
    }
    create_run_folder("runs/a", "shop", "").write_summary(numbers)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(Path("runs/a/summary.json").read_text(), parse_constant=refuse) == {
        "difference": {"mean": None, "tasks": 0},
        "passes": [{"interval": [None, 0.5]}],
        "pair": [None],
    }


def test_the_summary_may_hold_any_text() -> None:
    create_run_folder("runs/a", "shop", "").write_summary({"said": "Köln \ud800"})
    assert json.loads(Path("runs/a/summary.json").read_text(encoding="utf-8")) == {"said": "Köln ?"}


def test_the_folder_has_a_name_of_its_own_and_last_points_to_the_newest() -> None:
    runs = [create_run_folder(None, "my_pkg.mod:Env", "steps = 3\n") for _ in range(3)]
    assert len({run.folder for run in runs}) == 3
    assert all(run.folder.parent == Path("runs") and "my_pkg.mod-Env" in run.folder.name for run in runs)
    assert Path("runs/last").resolve() == runs[-1].folder.resolve()
    assert (Path("runs/last") / "config.toml").read_text() == "steps = 3\n"
    assert sorted(p.name for p in Path("runs").iterdir()) == sorted([*(r.folder.name for r in runs), "last"])
    create_run_folder("elsewhere/b", "shop", "")
    assert Path("elsewhere/last").resolve() == Path("elsewhere/b").resolve()


def test_a_folder_called_last_is_left_alone() -> None:
    Path("runs/last").mkdir(parents=True)
    create_run_folder("runs/a", "shop", "")
    assert not Path("runs/last").is_symlink()


@pytest.mark.parametrize("left", ["config.toml", "metrics.jsonl"])
def test_a_second_run_does_not_write_over_the_first(left: str) -> None:
    Path("runs/a").mkdir(parents=True)
    (Path("runs/a") / left).write_text("mine")
    with pytest.raises(UserError, match=r"run folder 'runs/a' holds a run already; give another --run.dir"):
        create_run_folder("runs/a", "shop", "")
    assert (Path("runs/a") / left).read_text() == "mine"
    assert not Path("runs/last").exists()


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_told(folder: str) -> None:
    Path("file").write_text("in the way")
    with pytest.raises(UserError, match=rf"cannot write the run folder '{folder}': .*; give another --run.dir"):
        create_run_folder(folder, "shop", "")


def test_other_programs_read_them_too() -> None:
    import datasets
    import duckdb
    import pandas

    run = create_run_folder("runs/a", "shop", "")
    run.write_trajectories(3, credited([Group(2**40, (GOOD, LOST))], [(0.5, 0.0)]))
    path = "runs/a/trajectories/train-000003.parquet"
    query = (
        f"select count(*), avg(reward), max(len(segments)), any_value(calls[1].name) from '{path}' where fault is null"
    )
    assert duckdb.sql(query).fetchall() == [(1, 1.0, 3, "search")]
    frame = pandas.read_parquet(path)
    assert list(frame["stop"]) == ["max_turns", "fault"]
    assert frame.groupby("task")["advantage"].sum()[2**40] == 0.5
    rows = datasets.load_dataset("parquet", data_files=path, split="train", cache_dir="cache")
    assert rows[0]["segments"][1]["token_ids"] == [3, 4]
    run.close()
