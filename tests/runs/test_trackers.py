"""Trackers get what is logged; one that fails costs nothing but itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl import UserError, train
from agentrl.runs.trackers import COLUMNS, Trackers, _tracker_arguments, check_trackers, open_trackers
from agentrl.types import Stop, Trajectory


def played(reward: float) -> Trajectory:
    return Trajectory(1, (), ({"role": "user", "content": "hé\n<b>"},), Stop.TERMINATED, rewards={"a": reward})


def test_tensorboard_gets_numbers_and_conversations(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_trackers(("tensorboard",), "p", tmp_path, {"seed": "0"}, print) as found:
        for step in (1, 2):
            found.log(step, {"reward": step / 4, "loss": float("nan")})
        found.episodes(2, [played(0.0), played(1.0)])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.25), (2, 0.5)]
    assert events.Tags()["scalars"] == ["reward"]
    (text,) = events.Tensors("episodes/0/text_summary")
    assert "reward 1.0" in text.tensor_proto.string_val[0].decode()


def test_a_training_is_tracked(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(
        "math-tools",
        steps=2,
        rollout={"tasks_per_step": 2, "group_size": 2},
        eval={"final_tasks": 2, "every": 0},
        run={"dir": str(tmp_path / "r"), "trackers": ["tensorboard"]},
    )
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    logged = [(line["step"], line["reward"]) for line in lines if "reward" in line]
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("reward")] == logged
    assert "eval/greedy_reward" in events.Tags()["scalars"]


def test_tensorboard_shows_no_step_twice_where_a_run_goes_on(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begun, last in ((0, 4), (2, 5)):  # killed at 4, and gone on with after 2
        with open_trackers(("tensorboard",), "p", tmp_path, {}, print, begun) as found:
            for step in range(begun + 1, last + 1):
                found.log(step, {"reward": step + begun / 10})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(e.step, round(e.value, 3)) for e in events.Scalars("reward")]
    assert shown == [(1, 1.0), (2, 2.0), (3, 3.2), (4, 4.2), (5, 5.2)]


def test_wandb_goes_on_with_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "wandb" / "run-20260101_000000-older").mkdir(parents=True)
    (tmp_path / "wandb" / "offline-run-20260102_000000-newer").mkdir()
    known = {"name": "r", "dir": str(tmp_path)}
    assert _tracker_arguments("wandb", "r", tmp_path, 0) == known
    assert _tracker_arguments("wandb", "r", tmp_path, 5) == known | {"id": "newer", "resume": "allow"}
    assert _tracker_arguments("wandb", "r", tmp_path / "none", 5) == {"name": "r", "dir": str(tmp_path / "none")}


class Fails:
    name = "fails"

    def log(self, values: Any, step: int) -> None:
        raise ConnectionError("no network")

    def finish(self) -> None:
        raise AssertionError("it was left")


class Keeps:
    name = "keeps"

    def __init__(self) -> None:
        self.logged: list[Any] = []
        self.tables: list[Any] = []

    def log(self, values: Any, step: int) -> None:
        self.logged.append((step, values))

    def log_table(self, name: str, columns: Any, data: Any, step: int) -> None:
        self.tables.append((name, columns, data, step))

    def finish(self) -> None: ...


def test_a_tracker_that_fails_is_told_of_and_left() -> None:
    told: list[str] = []
    keeps = Keeps()
    found = Trackers([Fails(), keeps], told.append)
    found.log(1, {"reward": 0.5})
    found.log(2, {"reward": 0.6})
    found.finish()
    assert told == ["tracker fails: ConnectionError: no network; nothing more is logged there"]
    assert keeps.logged == [(1, {"reward": 0.5}), (2, {"reward": 0.6})]


def test_episodes_are_a_table_of_the_best_and_the_worst() -> None:
    keeps = Keeps()
    Trackers([keeps], print).episodes(3, [played(i / 20) for i in range(20)])
    ((name, columns, rows, step),) = keeps.tables
    assert (name, columns, step) == ("episodes", COLUMNS, 3)
    assert [r[2] for r in rows] == [0.95, 0.9, 0.85, 0.8, 0.0, 0.05, 0.1, 0.15]


def test_a_tracker_of_numbers_alone_is_given_no_texts() -> None:
    class Mlflow(Fails):
        name = "mlflow"

    told: list[str] = []
    Trackers([Mlflow()], told.append).episodes(3, [played(0.5)])
    assert told == []


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("tensorbord",), "run.trackers: no tracker 'tensorbord'; did you mean 'tensorboard'"),
        (("comet_ml",), "run.trackers: comet_ml needs its package: pip install comet_ml"),
    ],
)
def test_a_wrong_tracker_is_a_sentence_before_anything_begins(names: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_trackers(names)
