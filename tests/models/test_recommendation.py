"""A model's folder recommends numbers; whatever else it says is refused before anything runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agentrl import UserError
from agentrl.cli import main
from agentrl.models.recommendation import read_recommendation
from agentrl.models.source import locate_model


def test_numbers_and_names_of_agentrls_own_are_taken(tmp_path: Path) -> None:
    text = 'steps = 9\ncall_format = "hermes"\n[learner]\nlr = 1e-4\noptimizer = "muon"\nlr_scheduler = "linear"\n'
    (tmp_path / "agentrl.toml").write_text(text)
    learner = {"lr": 1e-4, "optimizer": "muon", "lr_scheduler": "linear"}
    assert read_recommendation(tmp_path) == {"steps": 9, "call_format": "hermes", "learner": learner}
    assert read_recommendation(tmp_path / "none") == {}
    assert read_recommendation(Path(locate_model("nano")))["steps"] == 50


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('tools = ["mcp:touch ran"]', "tools"),
        ('env.name = "x.py:E"', "env.name"),
        ('"env" = "x.py:E"', "env"),
        ("env.level = 3", "env.level"),
        ('learner.optimizer = "x.py:E"', "learner.optimizer"),
        ('learner.loss = "x.py:loss"', "learner.loss"),
        ('call_format = "x.py:F"', "call_format"),
        ('engine.urls = ["http://example.org"]', "engine.urls"),
        ('run.trackers = ["wandb"]', "run.trackers"),
        ('chat_template = "/etc/passwd"', "chat_template"),
        ('model = "other/model"', "model"),
        ('learner.lr = "high"', "learner.lr"),
        ("learner.lr = true", "learner.lr"),
        ('report_to = "wandb"', "report_to"),
        ("[[stages]]\nsteps = 1\nenv = 'x.py:E'", "stages"),
        ("tool.python.interpreter = '/bin/sh'", "tool.python.interpreter"),
    ],
)
def test_anything_else_is_a_sentence_that_names_the_key(tmp_path: Path, text: str, key: str) -> None:
    (tmp_path / "agentrl.toml").write_text(text)
    with pytest.raises(UserError, match=rf"agentrl\.toml: .*{key}.* Remove that line"):
        read_recommendation(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "a" * (2 << 20),
        "a = " + "[" * 50_000,
        "a." * 30_000 + "b = 1",
        "steps = 0x" + "f" * 4000,
        "steps = " + "9" * 9000,
    ],
)
def test_a_file_that_would_take_long_is_no_toml(tmp_path: Path, text: str) -> None:
    (tmp_path / "agentrl.toml").write_text(text)
    with pytest.raises(UserError, match=r"agentrl\.toml is no valid TOML"):
        read_recommendation(tmp_path)


def test_the_command_line_starts_nothing_that_a_model_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(locate_model("nano"), model)
    (model / "agentrl.toml").write_text(f'tools = ["mcp:touch {tmp_path}/ran"]\n')
    assert main(["eval", "--model", str(model), "--env", "math-tools", "--tasks", "1"]) == 2
    assert "not tools = ['mcp:touch" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
