"""Evaluation sets: more held-out tasks by name, each with metrics, episodes and a place in the summary of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agentrl import Env, Reply, Step, Trajectory, UserError, compare, train
from agentrl.cli import main
from agentrl.environments.spec import EnvSpec
from agentrl.evaluation.sets import build_sets
from agentrl.settings.loader import build_config, dump_toml, read_overrides
from agentrl.training.callbacks import Callback

SMALL: dict[str, Any] = {
    "steps": 2,
    "rollout": {"tasks_per_step": 2, "group_size": 2, "max_tokens": 16},
    "eval": {"every": 1, "tasks": 3, "final_tasks": 4},
}
TOML = """
env = "math-tools"
[eval.sets.hard]
env.level = 4
tasks = 8
[eval.sets.shop]
env = "shop"
"""


class Said(Env):
    """Ask for a word; of level 9 the database is down."""

    opened: list[int] = []

    def __init__(self, level: int = 1) -> None:
        super().__init__()
        self.level = level
        self.opened.append(level)

    def list_splits(self) -> tuple[str, ...]:
        return ("train", "test", "rare")

    async def reset(self, *, seed: int, options: Any = None) -> tuple[str, dict[str, Any]]:
        if self.level == 9:
            raise ConnectionError("the database is down")
        return f"Say {seed} {options['split']} {self.level}.", {}

    async def step(self, reply: Reply) -> Step:
        return Step("", 0.0, True, False, {})

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"said": float(self.level)}


class Listening(Callback):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_message(self, text: str) -> None:
        self.messages.append(text)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_they_are_set_by_the_command_line_a_file_and_python(tmp_path: Path) -> None:
    import tomllib

    file = build_config(("file", tomllib.loads(TOML)))
    assert file.eval.sets["hard"].env == {"level": 4}
    assert file.eval.sets["shop"].env == {"name": "shop"}
    words = ["--env", "math-tools", "--eval.sets.hard.env.level", "4", "--eval.sets.hard.tasks", "8"]
    typed = build_config(read_overrides([*words, "--eval.sets.shop.env", "shop"]))
    python = {"hard": {"env": {"level": 4}, "tasks": 8}, "shop": {"env": "shop"}}
    assert file == typed == build_config(("python", {"env": "math-tools", "eval": {"sets": python}}))
    assert build_config(("again", tomllib.loads(dump_toml(file)))) == file
    assert list(build_config(read_overrides(["--env", "x", "--eval.sets", "a,b"])).eval.sets) == ["a", "b"]


@pytest.mark.slow
def test_each_has_its_metrics_its_episodes_and_its_place_in_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, listening = tmp_path / "run", Listening()
    sets = {"hard": {"env": {"level": 4}, "tasks": 2, "final_tasks": 2}, "rare": {}, "down": {"env": {"level": 9}}}
    settings = SMALL | {"eval": SMALL["eval"] | {"sets": sets}}
    summary = train(Said, run={"dir": str(run)}, callbacks=[listening], **settings).summary
    evaluations = [row for row in rows(run) if "eval/reward" in row]
    assert [row["step"] for row in evaluations] == [0, 1, 2]
    for row in evaluations:
        assert (row["eval/reward"], row["eval/hard/reward"], row["eval/rare/reward"]) == (1.0, 4.0, 1.0)
        assert "eval/down/reward" not in row
    assert [row["eval/hard/episodes"] for row in evaluations] == [2, 2, 2]
    told = [m for m in listening.messages if "eval.sets.down is left out" in m]
    assert len(told) == 3
    assert "the database is down" in told[0]
    for name, asked in (("hard", "test 4"), ("rare", "rare 1")):
        table = pq.read_table(run / "trajectories" / f"{name}-000001.parquet")
        assert all(asked in question for question in table["question"].to_pylist())
    assert summary["sets"]["hard"]["before"]["sampled"]["reward"] == 4.0
    assert summary["sets"]["hard"]["difference"]["sampled"]["mean"] == 0.0
    assert set(summary["sets"]) == {"hard", "rare"}
    assert compare(f"{run}@0", f"{run}@2", split="rare").difference.mean == 0.0
    assert main(["report", str(run)]) == 0


def test_a_set_with_no_settings_shares_what_the_run_holds_open() -> None:
    spec = EnvSpec(Said, level=2)
    config = build_config(("test", {"env": "math-tools", "eval": {"sets": {"rare": {}, "own": {"env": {"level": 3}}}}}))
    rare, own = build_sets(config, spec)
    assert rare.spec is spec
    assert (own.spec.settings, own.split, rare.split, own.tasks) == ({"level": 3}, "test", "rare", 128)


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        ({"hard": {"env": {"levl": 4}}}, "eval.sets.hard: env 'math-tools' has no setting 'env.levl'.*level"),
        ({"hard": {"env": "shopp"}}, "eval.sets.hard: no env 'shopp'; did you mean 'shop'"),
        ({"hard": {"split": "tset"}}, "eval.sets.hard: split is train or test, not 'tset'"),
        ({"hard": {"tasks": 0}}, "greater than or equal to 1, not 0"),
        ({"hard": {"task": 4}}, r"eval.sets.hard.task"),
        ({"train": {}}, "not train or test; not 'train'"),
        ({"a/b": {}}, "a name is letters, digits and _"),
        (3, "eval.sets"),
    ],
)
def test_a_set_that_cannot_be_is_refused(sets: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        train("math-tools", run={"dir": str(tmp_path / "run")}, **SMALL | {"eval": {"sets": sets}})
    assert not (tmp_path / "run").exists()
