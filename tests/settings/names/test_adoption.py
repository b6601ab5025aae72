"""Names of TRL, verl and vLLM in a run's settings: accepted, named in a line, refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.settings.loader import build_config, read_overrides
from agentrl.settings.names.adoption import take_env_names

BASE = ("base", {"env": "math-tools"})


def test_a_name_of_trl_sets_what_it_is_here_and_a_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    config = build_config(BASE, read_overrides(["--num_generations", "4", "--learning-rate", "2e-6", "--bf16", "True"]))
    assert (config.rollout.group_size, config.learner.lr, config.learner.bf16) == (4, 2e-6, True)
    said = capsys.readouterr()
    assert "agentrl: num_generations = 4 is rollout.group_size = 4 here\n" in said.err
    assert "agentrl: bf16 = true is learner.bf16 = true here\n" in said.err.replace("'True'", "true")
    assert said.out == ""


def test_what_needs_no_setting_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    build_config(BASE, ("file", {"log_completions": True, "logit_bias": None}))
    said = capsys.readouterr().err
    assert "log_completions = true: nothing to set: every completion is kept in trajectories/" in said
    assert "logit_bias: nothing to set: this is how it is here" in said


def test_only_the_first_process_says_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert build_config(BASE, ("file", {"num_generations": 4})).rollout.group_size == 4
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        ({"min_tokens": 9}, "min_tokens: not here: the learner has no counterpart of it, and what is sampled must"),
        ({"num_generations": 4, "rollout": {"group_size": 8}}, "num_generations: this is rollout.group_size, which is"),
        ({"num_generations": 4, "rollout": {"n": 8}}, "rollout.group_size is given by num_generations too"),
        ({"peft_config": {"lora_dropout": 0.5}}, "lora_dropout: not here: adapters have no dropout"),
        ({"deepspeed": "ds.json"}, "deepspeed: not here: what several processes hold of the policy"),
        ({"args": object()}, "args: not here: give its fields as settings"),
        ({"rollout_func": print}, "rollout_func: not here: an environment is a class here"),
        ({"use_kl_loss": True, "learner": {"beta": 0.1}}, "use_kl_loss: this is learner.beta, which is given too"),
    ],
)
def test_what_is_not_here_or_is_given_twice_is_refused(layer: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_config(BASE, ("file", layer))
    assert sentence in str(raised.value)
    assert str(raised.value).endswith("[file]")


def test_a_later_layer_wins_whatever_its_words() -> None:
    first = ("file", {"num_generations": 4, "learning_rate": 1e-5})
    assert build_config(BASE, first, read_overrides(["--rollout.group_size", "6"])).rollout.group_size == 6
    second = read_overrides(["--seed", "3", "--max_completion_length", "9"])
    config = build_config(BASE, first, ("more", {"rollout": {"group_size": 6}}), second)
    assert (config.rollout.group_size, config.rollout.max_tokens) == (6, 9)
    assert build_config(BASE, ("file", {"rollout": {"group_size": 6}}), first).rollout.group_size == 4


def test_a_batch_is_counted_with_the_group_size_that_holds_in_whatever_words() -> None:
    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3}
    assert build_config(BASE, ("file", batch)).rollout.tasks_per_step == 3
    assert build_config(BASE, ("file", {**batch, "num_generations": 4})).rollout.tasks_per_step == 6
    assert build_config(BASE, ("file", {**batch, "rollout": {"group_size": 4}})).rollout.tasks_per_step == 6
    assert build_config(BASE, ("file", batch), read_overrides(["--num_generations", "4"])).rollout.tasks_per_step == 6


def test_a_batch_is_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert build_config(BASE, ("file", {"per_device_train_batch_size": 8})).rollout.tasks_per_step == 2


def test_a_setting_of_the_environment_is_not_taken_for_another_library_s_name() -> None:
    base = ("base", {"env": "shop"})
    with pytest.raises(ConfigError, match=r"latency_s: unknown setting; it is one of env 'shop': --env.latency_s"):
        build_config(base, ("file", {"latency_s": 1}))


def test_verl_s_tables_are_read_in_toml() -> None:
    layer = {
        "actor_rollout_ref": {"rollout": {"n": 5}, "actor": {"optim": {"lr": 3e-6}}},
        "data": {"train_batch_size": 2},
    }
    config = build_config(BASE, ("file", layer))
    assert (config.rollout.group_size, config.learner.lr, config.rollout.tasks_per_step) == (5, 3e-6, 2)
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.rollout.nn: unknown setting"):
        build_config(BASE, ("file", {"actor_rollout_ref": {"rollout": {"nn": 5}}}))


def test_names_of_the_environment_s_settings_are_taken_out_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    env, rest = take_env_names({"reward_funcs": ["accuracy"], "train_dataset": "rows.jsonl", "steps": 3})
    assert env == {"rewards": ["accuracy"], "data": "rows.jsonl"}
    assert rest == {"steps": 3}
    assert "train_dataset = 'rows.jsonl' is env.data = 'rows.jsonl' here" in capsys.readouterr().err
