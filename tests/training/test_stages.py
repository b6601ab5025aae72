"""Stages: one run, one policy, a stretch of steps each with its own environment; resumed anywhere to the same end."""

from __future__ import annotations

import json
import runpy
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from agentrl import Callback, Env, Reply, Step, ToolEnv, UserError, train
from agentrl.cli import main
from agentrl.environments.spec import EnvSpec
from agentrl.models.policy import load_policy
from agentrl.settings.loader import build_config, dump_toml, read_overrides
from agentrl.training.stages import build_stages, find_stage

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL: dict[str, Any] = {
    "rollout": {"tasks_per_step": 2, "group_size": 4, "max_tokens": 12},
    "eval": {"every": 2, "tasks": 2, "final_tasks": 2},
    "learner": {"lr": 1e-3},
}
TOML = """
env = "math-tools"
[rollout]
group_size = 4
[[stages]]
name = "easy"
steps = 2
env.level = 1
rollout.group_size = 2
[[stages]]
steps = 3
learner.lr = 1e-4
reset_optimizer = true
"""


class Length(Env):
    """Pay for long answers, in a few tokens."""

    def __init__(self, level: int = 1) -> None:
        super().__init__()
        self.level = level

    async def reset(self, *, seed: int, options: Any = None) -> tuple[str, dict[str, Any]]:
        return f"Say {seed} of {self.level}.", {}

    async def step(self, reply: Reply) -> Step:
        return Step("", len(reply.content) % 7 / 7, True, False, {})


class Calls(ToolEnv):
    """Offer a tool, which the other stage does not."""

    tools = ("calculator",)
    max_turns = 2

    async def reset(self, *, seed: int, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.ask(f"Compute {seed} + 1."), {}

    async def score(self, trajectory: Any) -> dict[str, float | None]:
        return {"long": len(trajectory.answer) % 7 / 7}


class Killed(Callback):
    """Ends the run in the middle of a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.at:
            raise ProcessLookupError("killed")


def steps(run: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "step_time" in line]


def questions(run: Path, step: int, split: str = "train") -> list[str]:
    found: list[str] = pq.read_table(run / "trajectories" / f"{split}-{step:06d}.parquet")["question"].to_pylist()
    return found


def test_a_file_python_and_the_saved_config_name_the_same_stages() -> None:
    file = build_config(("file", tomllib.loads(TOML)))
    assert (file.steps, [s.steps for s in file.stages]) == (5, [2, 3])
    python = {"env": "math-tools", "rollout": {"group_size": 4}, "stages": tomllib.loads(TOML)["stages"]}
    assert build_config(("python", python)) == file
    assert build_config(("saved", tomllib.loads(dump_toml(file)))) == file
    assert build_config(("recommended", {"steps": 50}), ("file", tomllib.loads(TOML))).steps == 5
    last = build_config(("file", {"stages": [{"steps": 1, "env": "shop"}, {"steps": 2, "env": "math-tools"}]}))
    assert last.env == {"name": "math-tools"}


def test_each_has_its_settings_over_those_of_the_run() -> None:
    config = build_config(("file", tomllib.loads(TOML)))
    spec = EnvSpec.from_config(config)
    easy, rest = build_stages(config, spec)
    assert (easy.first, easy.last, rest.first, rest.last) == (1, 2, 3, 5)
    assert (easy.config.rollout.group_size, rest.config.rollout.group_size) == (2, 4)
    assert (easy.config.learner.lr, rest.config.learner.lr) == (1e-6, 1e-4)
    assert (easy.spec.settings, rest.spec) == ({"level": 1}, spec)
    assert [find_stage([easy, rest], step).number for step in range(6)] == [1, 1, 1, 2, 2, 2]
    assert str(easy) == "stage 1, easy"


def test_one_run_goes_through_all_of_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stages = [
        {"name": "two", "steps": 2, "env": {"level": 2}, "rollout": {"group_size": 2}},
        {"steps": 1, "env": {"level": 3}, "learner": {"lr": 1e-4, "beta": 0.1}, "reset_optimizer": True},
        {"steps": 2},
    ]
    settings = {**SMALL, "stages": stages, "learner": {"lr": 1e-3, "lr_scheduler": "constant"}}
    summary = train(Length, run={"dir": str(run), "save_every": 0}, **settings).summary
    told = steps(run)
    assert summary["steps"] == 5
    assert [row["stage"] for row in told] == [1, 1, 2, 3, 3]
    assert [row["lr"] for row in told] == pytest.approx([1e-3, 1e-3, 1e-4, 1e-3, 1e-3])
    assert [row["episodes"] for row in told] == [4, 4, 8, 8, 8]
    assert ["kl" in row for row in told] == [False, False, True, False, False]
    for step, level in enumerate([2, 2, 3, 1, 1], 1):
        assert all(f"of {level}." in q for q in questions(run, step))
    assert all("of 1." in q for step in (0, 2, 4, 5) for q in questions(run, step, "test"))  # they compare
    events = [json.loads(line)["text"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert [e for e in events if "begins" in e] == [
        "stage 1, two of 3 begins: steps 1 to 2",
        "stage 2 of 3 begins: steps 3 to 3",
        "stage 3 of 3 begins: steps 4 to 5",
    ]
    versions = [row["policy_version"] for row in told]
    assert versions == sorted(versions)
    assert main(["report", str(run)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kills", [(1, 3), *(pytest.param(k, marks=pytest.mark.long) for k in ((2, 4), (3, 5)))])
def test_killed_in_any_stage_it_ends_the_same(kills: tuple[int, ...], tmp_path: Path) -> None:
    stages = [
        {"steps": 2, "env": {"level": 2}},
        {"steps": 2, "reset_optimizer": True, "learner": {"beta": 0.1}},
        {"steps": 1},
    ]
    settings = {**SMALL, "stages": stages, "deterministic": True}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(Length, run={"dir": str(whole), "save_every": 1}, **settings)
    again = {"dir": str(broken), "save_every": 1, "resume": True}
    for at in kills:
        with pytest.raises(ProcessLookupError):
            train(Length, run=again, callbacks=[Killed(at)], **settings)
    train(Length, run=again, **settings)
    one, other = (load_file(next((run / "model").glob("*.safetensors"))) for run in (whole, broken))
    assert [n for n in one if not torch.equal(one[n], other[n])] == []
    for name in ("reward", "stage", "loss", "lr"):
        assert [row.get(name) for row in steps(whole)] == [row.get(name) for row in steps(broken)]
    for step in range(1, 6):
        assert questions(whole, step) == questions(broken, step)


@pytest.mark.slow
def test_ahead_of_the_learner_a_stage_takes_no_episode_of_another(tmp_path: Path) -> None:
    stages = [{"steps": 2, "env": {"level": 2}}, {"steps": 2, "env": {"level": 3}}]
    settings = {**SMALL, "stages": stages, "rollout": SMALL["rollout"] | {"max_staleness": 2}}
    again = {"dir": str(tmp_path / "run"), "save_every": 1, "resume": True}
    for at in (1, 2, 3):
        with pytest.raises(ProcessLookupError):
            train(Length, run=again, callbacks=[Killed(at)], **settings)
    train(Length, run=again, **settings)
    for step, level in enumerate([2, 2, 3, 3], 1):
        assert all(f"of {level}." in q for q in questions(tmp_path / "run", step))


@pytest.mark.slow
def test_stages_may_differ_in_their_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    module = f"{__name__}:Calls"
    train(Length, run={"dir": str(run)}, stages=[{"steps": 1, "env": module}, {"steps": 1}], **SMALL)
    tokenizer = load_policy("nano").tokenizer
    for step, offered in ((1, True), (2, False)):
        for row in pq.read_table(run / "trajectories" / f"train-{step:06d}.parquet").to_pylist():
            assert ("calculator" in tokenizer.decode(row["segments"][0]["token_ids"])) == offered


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stages": [{"steps": 1, "model": "other"}]}, "stages.0: a stage has no model of its own: one policy"),
        ({"stages": [{"steps": 0}]}, "stages.0.steps: input should be greater than or equal to 1"),
        ({"stages": [{"name": "a"}]}, "stages.0.steps: field required"),
        ({"stages": [{"steps": 1, "evn": {}}]}, "stages.0.evn"),
        (
            {"stages": [{"steps": 1, "learner": {"loss": "grpo"}}]},
            "learner.loss is of the whole run; a stage may",
        ),
        ({"stages": [{"steps": 1, "learner": {"lr": -1}}]}, "stages.0.learner.lr: input should be greater than 0"),
        ({"stages": [{"steps": 1, "rollout": {"group_size": 1}}]}, "stages.0.rollout.group_size"),
        ({"stages": [{"steps": 1, "env": {"levl": 3}}]}, "stages.0: env 'math-tools' has no setting 'env.levl'"),
        ({"stages": [{"steps": 1, "env": "shopp"}]}, "stages.0: no env 'shopp'; did you mean 'shop'"),
        ({"stages": [{"steps": 2}], "steps": 5}, "steps 5: the stages have 2 together"),
        ({"stages": [{"steps": 2}], "epochs": 1}, "epochs and stages do not go together"),
        ({"stages": 3}, "stages"),
    ],
)
def test_a_stage_that_cannot_be_is_refused(settings: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        train("math-tools", run={"dir": str(tmp_path / "run")}, **settings)
    assert not (tmp_path / "run").exists()


def test_another_number_of_steps_is_refused_where_there_are_stages() -> None:
    with pytest.raises(UserError, match="steps 9: the stages have 5 together"):
        build_config(("file", tomllib.loads(TOML)), read_overrides(["--steps", "9"]))


@pytest.mark.long
def test_the_example_learns_the_format_and_then_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "stages.py"))["main"](steps=60)
    told = steps(tmp_path / "runs" / "last")
    shape = [row["rewards/boxed/mean"] for row in told if row["stage"] == 1]
    answer = [row["rewards/exact/mean"] for row in told if row["stage"] == 2]
    assert shape[-1] > 0.9
    assert answer[-1] > answer[0] + 0.2
