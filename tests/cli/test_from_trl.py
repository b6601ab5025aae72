"""``agentrl from-trl``: a script of the docs' kind becomes TOML that trains."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from agentrl.cli import main

SCRIPT = """\
import re

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"[0-9]+")


def last_number(text):
    return (NUMBER.findall(text) or [""])[-1]


def exact(completions, solution, **columns):
    return [float(last_number(text) == right) for text, right in zip(completions, solution)]


async def brief(completions, **columns):
    return [float(len(text) < 40) for text in completions]


dataset = load_dataset("json", data_files="rows.jsonl", split="train")
training_args = GRPOConfig(
    output_dir="out",
    learning_rate=1e-4,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=8,
    max_steps=1,
    bf16=False,
    reward_weights=[1.0, 0.1],
)
trainer = GRPOTrainer(model="nano", reward_funcs=[exact, brief], args=training_args, train_dataset=dataset)
trainer.train()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_trl.py").write_text(SCRIPT)
    rows = [{"prompt": f"What is {i} + 1?", "solution": str(i + 1)} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_it_prints_toml_and_says_what_is_left_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-trl", "train_trl.py"]) == 0
    said = capsys.readouterr()
    assert tomllib.loads(said.out)["env"]["rewards"] == ["train_trl.py:exact", "train_trl.py:brief"]
    assert "# TODO: importing train_trl.py for its functions would start the training of line 32" in said.out
    assert said.err == "agentrl: one thing is left to do; the lines that begin with # TODO say what\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["gone.py"], "no file 'gone.py'"),
        (["train_trl.py", "other.py"], "no file 'other.py'"),
        (["train_trl.py", "train_trl.py"], "reads one script at a time"),
        (["grpo.yaml", "--functions", "f.py"], "there are no functions of the script's own to write"),
    ],
)
def test_wrong_words_are_told(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    (folder / "grpo.yaml").write_text("max_steps: 1\n")
    assert main(["from-trl", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_the_toml_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["from-trl", "train_trl.py", "--functions", "train_trl_functions.py"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    (folder / "train.toml").write_text(said.out)
    assert main(["train", "train.toml", "--eval.final_tasks", "1"]) == 0
    rows = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    assert {"rewards/exact/mean", "rewards/brief/mean"} <= {name for row in rows for name in row}
    assert (folder / "out/model/config.json").is_file()
