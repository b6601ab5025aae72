"""Mistakes with evaluations: each ends in one sentence, before anything is loaded or played."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl import UserError, compare, evaluate
from agentrl.cli import main
from agentrl.evaluation.scope import EvaluationScope
from tests.helpers.evaluations import evaluated


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tasks": "x"}, "tasks: input should be a valid integer.*not 'x'"),
        ({"tasks": 0}, "tasks: input should be greater than or equal to 1, not 0"),
        ({"tasks": 10**18}, r"split 'test' has 147,483,648 tasks"),
        ({"first": -1}, "first: input should be greater than or equal to 0"),
        ({"trials": "many"}, "trials: input should be a valid integer"),
        ({"greedy": "perhaps"}, "greedy: input should be a valid boolean"),
        ({"greedy": True, "trials": 4}, "trials 4 does nothing with greedy"),
        ({"retry_faults": "perhaps"}, "retry_faults: input should be a valid boolean"),
        ({"pass_at": float("nan")}, "eval.pass_at: input should be a finite number, not nan"),
        ({"endpoint": 3}, "endpoint: input should be a valid string, not 3"),
        ({"endpoint": ""}, "endpoint: string should have at least 1 character"),
        ({"key_env": "KEY"}, "key_env does nothing without an endpoint"),
        ({"out": 3}, "out: "),
        ({"out": ""}, "out: "),
        ({"tokenizer": 3}, "tokenizer is for a loaded model; 'nano' is a name"),
        ({"env_args": 3}, "env_args: input should be a valid dictionary, not 3"),
        ({"eval": {"trials": 3}}, "eval: an evaluation takes trials and pass_at as arguments"),
    ],
)
def test_a_wrong_argument_of_evaluate_is_refused_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        evaluate("math-tools", **given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"before": 3}, "before: "),
        ({"split": 3}, "split: input should be a valid string"),
        ({"greedy": "x"}, "greedy: input should be a valid boolean"),
        ({"pass_at": float("nan")}, "pass_at: input should be a finite number"),
        ({"pass_at": "x"}, "pass_at: input should be a valid number"),
    ],
)
def test_a_wrong_argument_of_compare_is_refused_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        compare(**{"before": "a", "after": "b", **given})


async def test_compare_takes_paths(tmp_path: Path) -> None:
    await evaluated(tmp_path / "a", EvaluationScope(tasks=5))
    await evaluated(tmp_path / "b", EvaluationScope(tasks=5))
    assert compare(tmp_path / "a", tmp_path / "b").difference.tasks == 5


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--tasks 1e12", "has 147,483,648 tasks"),
        ("--tasks 2.5", "--tasks: input should be a valid integer"),
        ("--trials 2 --eval.trials 3", "--trials and --eval.trials are the same setting"),
        ("--pass_at inf", "eval.pass_at: input should be a finite number"),
        ("--rollout.temperature inf", "rollout.temperature: input should be a finite number"),
        ("--key_env KEY", "--key_env does nothing without an endpoint"),
        ("--template.history kept", "history is 'kept'; it is one of as_sampled, as_template"),
        (
            "--template.history as_sampled --endpoint http://127.0.0.1:9/v1",
            "a server renders each conversation anew, as its template has it; leave the setting out",
        ),
    ],
)
def test_a_wrong_word_of_eval_is_refused_in_a_sentence(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--env", "math-tools", *words.split()]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("text", ["version = 9\n", "", 'tasks = "x"\n', "tasks = = 3\n", "\udcff"])
async def test_an_evaluation_that_another_version_wrote_is_not_taken_for_256_tasks(tmp_path: Path, text: str) -> None:
    await evaluated(tmp_path / "a", EvaluationScope(tasks=5))
    (tmp_path / "a" / "evaluation.toml").write_text(text, "utf-8", "surrogateescape")
    assert main(["eval", "--resume", str(tmp_path / "a")]) == 2
    with pytest.raises(UserError, match=r"evaluation\.toml cannot be read"):
        compare(tmp_path / "a", tmp_path / "a")


async def test_damaged_settings_of_an_evaluation_are_no_traceback(tmp_path: Path) -> None:
    await evaluated(tmp_path / "a", EvaluationScope(tasks=5))
    for text in (b"a = = 3", b"\xff"):
        (tmp_path / "a" / "config.toml").write_bytes(text)
        with pytest.raises(UserError, match=r"config\.toml is no valid TOML"):
            compare(tmp_path / "a", tmp_path / "a")


def test_a_template_that_is_no_text_and_settings_that_are_no_toml_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary").write_bytes(b"\x8a\xff")
    assert main(["check", "model", "nano", "--chat_template", str(tmp_path / "binary")]) == 2
    assert "is no text in UTF-8" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "agentrl.toml").write_text("a = = 3")
    assert main(["train", "--env", "math-tools", "--model", str(tmp_path)]) == 2
    assert re.search(r"agentrl\.toml is no valid TOML", capsys.readouterr().err)


def test_a_budget_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "env", "math-tools", "--budget_s", "nan"]) == 2
    assert "--budget_s: input should be a finite number" in capsys.readouterr().err


def test_a_command_whose_output_was_closed_before_it_began_still_ends_well() -> None:
    words = [sys.executable, "-c", "import sys; from agentrl.cli import main; sys.exit(main(['--version']))"]
    script = 'exec "$@" >&-'
    assert subprocess.run(["bash", "-c", script, "_", *words], capture_output=True, text=True).stderr == ""
