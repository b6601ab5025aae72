"""Arguments and settings given wrongly, in Python and on the command line: one sentence each, in the words of both."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl import UserError, evaluate, train
from agentrl.cli import main
from agentrl.training.callbacks import Callback

ROWS = [{"prompt": "2 + 2?", "solution": "4"}] * 4


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"env_kwargs": {"data": ROWS}}, r"env 'prompts' needs a value for --env\.data \(in Python: env_args="),
        ({"env_args": {"data": ROWS}, "env_kwargs": {"rewards": ["math"]}}, r"env_kwargs: .*env_args=\{\.\.\.\}"),
        (
            {"env_args": {"data": ROWS}, "rewards": ["math"]},
            r"rewards is a setting of env 'prompts': env_args=\{'rewards': \.\.\.\}",
        ),
        ({"env_args": 3}, r"env_args: input should be a valid dictionary, not 3"),
        ({"env_args": {"data": ROWS}, "callbacks": [Callback]}, "callbacks takes objects of subclasses"),
        ({"env_args": {"data": ROWS}, "curriculum": "hard"}, r"curriculum is a function .*, not 'hard'"),
        ({"env_args": {"data": ROWS, "env": 3}}, r"env 'prompts' has no setting 'env\.env'"),
        ({"env_args": {"data": ROWS}, "steps": True}, r"steps: input should be a valid integer, not True"),
    ],
)
def test_a_wrong_argument_of_train_is_refused_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        train("prompts", **given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rewards": ["math"]}, r"rewards is a setting of env 'prompts': env_args=\{'rewards': \.\.\.\}"),
        ({"trials": True}, r"trials: input should be a valid integer, not True"),
        ({"tasks": True}, r"tasks: input should be a valid integer, not True"),
        ({"pass_at": True}, r"eval\.pass_at: input should be a valid number, not True"),
        ({"retry_faults": True}, r"retry_faults does nothing in a new folder"),
    ],
)
def test_a_wrong_argument_of_evaluate_is_refused_in_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        evaluate("prompts", env_args={"data": ROWS}, **given)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "train --env prompts --env.data x --rewards math",
            "rewards: unknown setting; it is one of env 'prompts': --env.rewards",
        ),
        ("train --env math-tools --steps true", "steps: input should be a valid integer, not True"),
        ("train --env math-tools --learner.lr true", "learner.lr: input should be a valid number, not True"),
        (
            "train --env math-tools --engine.max_model_len false",
            "engine.max_model_len: input should be a valid integer",
        ),
        ("train --env shop --env.latency_s true", "env.latency_s of env 'shop': input should be a valid number"),
        (
            "train --env math-tools --eval.every 0 --eval.tasks 9",
            "tasks 9 is of the evaluations in mid-run, and every 0 makes none: final_tasks",
        ),
        ("eval --env math-tools --eval.trials true", "eval.trials: input should be a valid integer, not True"),
        ("eval --env math-tools --tasks true", "--tasks: input should be a valid integer, not True"),
        ("eval --env math-tools --retry_faults true", "retry_faults does nothing in a new folder"),
        ("eval --env math-tools --key_env OPENAI_API_KEY", "--key_env does nothing without an endpoint"),
        ("play --env math-tools --key_env KEY", "--key_env does nothing without --endpoint"),
    ],
)
def test_a_wrong_word_is_refused_in_a_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert sentence in capsys.readouterr().err


def test_a_switch_is_still_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--env", "math-tools", "--deterministic", "true", "--rollout.oversample", "1"]) == 2
    assert "deterministic and rollout.oversample do not go together" in capsys.readouterr().err
