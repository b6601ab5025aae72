"""Settings of a run folder that mean code are followed where the user made the run, or said so."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from agentrl import UserError
from agentrl.settings.trust import list_code_settings, read_run_layer, remember_run


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def folder(path: Path, text: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.toml").write_text(text)
    return path


def refused(path: Path, **given: Any) -> bool:
    try:
        read_run_layer(path, given)
    except UserError as error:
        return "Nothing was run" in str(error)
    return False


HARMLESS = [
    'env.name = "math-tools"\nenv.level = 2\nenv.tool = "python"',
    'env = "shop"\ntools = ["calculator", "python"]',
    'env.name = "reasoning-gym:leg_counting"',
    'env.name = "reasoning-gym:leg_counting"\nenv.system_prompt = "Answer: in words, as in A: B."',
    'model = "Qwen/Qwen3-0.6B"\nlearner.loss = "grpo"\nlearner.optimizer = "muon"\nrollout.sampler = "difficulty"',
    'env = "math-tools"\nlearner.betas = [0.9, 0.99]\nrun.dir = "runs/x"\nlora.targets = ["q"]\nengine.name = "auto"',
    'env = "math-tools"\n[eval.sets.hard.env]\nlevel = 4\n[[stages]]\nsteps = 3\nenv.level = 1\nrollout.group_size = 4',
    'env = "math-tools"\nrun.callbacks = []\nrun.metrics = []\nrun.trackers = []',
]
CODE = {
    'env.name = "x.py:E"': "env.name",
    'env.name = "pkg.mod:E"': "env.name",
    'env = "x.py:E"': "env",
    '"env.name" = "x.py:E"': "env.name",
    'env.name = "shop:E"': "env.name",
    'env.name = "gym:os:system"': "env.name",
    'env.name = "openenv"\nenv.url = "host:80"': "env.name",
    'env.name = "prompts"\nenv.data = "stranger/rows"': "env.data",
    'env.name = "prompts"\nenv.rewards = ["accuracy", "my dir/x.py:f"]': "env.rewards",
    'env.name = "prompts"\nenv.rewards = "accuracy,os:system"': "env.rewards",
    'env.name = "prompts"\nenv.rewards = ["judge"]\nenv.reward_settings.judge.url = "http://h"': (
        "env.reward_settings.judge.url"
    ),
    'env.name = "math-tools"\ntools = ["mcp:touch ran"]': "tools",
    'env.name = "math-tools"\ntools = "calculator,x.py:t"': "tools",
    'env.name = "math-tools"\ntools = ["remote:e2b"]': "tools",
    'env.name = "math-tools"\ntool.python.interpreter = "/bin/sh"': "tool.python.interpreter",
    'env.name = "math-tools"\nlearner.loss = "x.py:loss"': "learner.loss",
    'env.name = "math-tools"\nlearner.advantage = "os:system"': "learner.advantage",
    'env.name = "math-tools"\nlearner.importance_sampling_mode = "m:f"': "learner.importance_sampling_mode",
    'env.name = "math-tools"\nlearner.optimizer = "m:f"': "learner.optimizer",
    'env.name = "math-tools"\nrollout.sampler = "m:f"': "rollout.sampler",
    'env.name = "math-tools"\nrollout.curriculum = "m:f"': "rollout.curriculum",
    'env.name = "math-tools"\ncall_format = "x.py:F"': "call_format",
    'env.name = "math-tools"\nengine.name = "x.py:E"': "engine.name",
    'env.name = "math-tools"\nengine = "launched"': "engine",
    'env.name = "math-tools"\nengine.args.launcher = "x.py:l"': "engine.args.launcher",
    'env.name = "math-tools"\nengine.urls = ["http://example.org"]': "engine.urls",
    'env.name = "math-tools"\nrun.trackers = ["wandb"]': "run.trackers",
    'env.name = "math-tools"\nrun.callbacks = ["x.py:C"]': "run.callbacks",
    'env.name = "math-tools"\nrun.metrics = ["x.py:f"]': "run.metrics",
    'env.name = "math-tools"\nrun.fallback_dir = "/home"': "run.fallback_dir",
    'env.name = "math-tools"\nreport_to = "wandb"': "report_to",
    'env.name = "math-tools"\nlearner.loss_args.f = "x.py:f"': "learner.loss_args.f",
    'env.name = "math-tools"\nmodel = "http://example.org/m"': "model",
    'env.name = "math-tools"\n[[stages]]\nsteps = 1\nenv = "x.py:E"': "stages.0.env",
    'env.name = "math-tools"\n[[stages]]\nsteps = 1\nenv.name = "m:E"': "stages.0.env.name",
    'env.name = "math-tools"\n[eval.sets.a]\nenv = "m:E"': "eval.sets.a.env",
    'env.name = "math-tools"\n[eval.sets.a.env]\nname = "x.py:E"': "eval.sets.a.env.name",
    'env.name = "math-tools"\n[eval.sets."a.b".env]\nrewards = "x.py:E"': "eval.sets.a.b.env.rewards",
}


@pytest.mark.parametrize("text", HARMLESS)
def test_registered_names_and_numbers_are_data(tmp_path: Path, text: str) -> None:
    assert list_code_settings(tomllib.loads(text)) == {}
    assert not refused(folder(tmp_path / "run", text))


@pytest.mark.parametrize("text", CODE)
def test_what_loads_code_or_reaches_out_is_refused_by_name(tmp_path: Path, text: str) -> None:
    assert list(list_code_settings(tomllib.loads(text))) == [CODE[text]] or "openenv" in text
    with pytest.raises(UserError, match=rf"{CODE[text]} = .*Nothing was run.*--trust"):
        read_run_layer(folder(tmp_path / "run", text), {})


def test_a_run_of_ones_own_is_trusted_also_where_its_code_goes_on_changing(tmp_path: Path) -> None:
    Path("x.py").write_text("E = 1")
    text = 'env.name = "x.py:E"\nenv.level = 1'
    remember_run(tomllib.loads(text))
    assert not refused(folder(tmp_path / "run", text))
    Path("x.py").write_text("E = 2")  # that is what rescore is for
    assert not refused(tmp_path / "run")
    assert refused(folder(tmp_path / "run", 'env.name = "y.py:E"\nenv.level = 1'))


def test_a_copy_beside_other_code_of_the_same_name_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("x.py").write_text("E = 1")
    text = 'env.name = "x.py:E"'
    remember_run(tomllib.loads(text))
    folder(tmp_path / "stranger", text)
    (tmp_path / "stranger" / "x.py").write_text("E = evil")
    monkeypatch.chdir(tmp_path / "stranger")
    assert refused(Path())


def test_trust_is_remembered_until_the_settings_or_the_code_change(tmp_path: Path) -> None:
    text, run = 'env.name = "x.py:E"\ntools = ["mcp:touch ran"]', tmp_path / "run"
    Path("x.py").write_text("import beside")
    Path("beside.py").write_text("E = 1")
    folder(run, text)
    assert refused(run)
    read_run_layer(run, {}, trust=True)
    assert not refused(run)
    assert not refused(folder(tmp_path / "copied", text + "\nsteps = 9"))  # the same code
    Path("beside.py").write_text("E = 2")
    assert refused(run)
    Path("beside.py").write_text("E = 1")
    assert refused(folder(run, text.replace("touch", "rm")))


def test_what_the_command_line_replaces_is_not_asked_about(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", 'env.name = "x.py:E"\nenv.url = "http://h"\ntools = ["mcp:touch ran"]')
    assert refused(run, env={"name": "math-tools"})
    assert refused(run, tools=["calculator"])
    assert not refused(run, env={"name": "math-tools"}, tools=["calculator"])


def test_nothing_is_remembered_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    remember_run({"env": {"name": "x.py:E"}})
    assert refused(folder(tmp_path / "run", 'env.name = "x.py:E"'))
