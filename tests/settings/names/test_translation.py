"""The table: every field of TRL's, its default, and what each value is here."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agentrl_envs.prompts import Prompts

from agentrl.settings.loader import build_config, list_settings
from agentrl.settings.names.training_arguments import TRAINING_FIELDS
from agentrl.settings.names.translation import TABLE, _read_value, find_name, translate
from agentrl.settings.names.trl import GRPO_FIELDS
from agentrl.settings.schema import TrainConfig

FIELDS = (Path(__file__).parent / "grpo_config_fields.txt").read_text().split()
OF_TRL = {entry.name: entry for entry in (*TRAINING_FIELDS, *GRPO_FIELDS)}
EVERY = [entry for entries in TABLE.values() for entry in entries]


def settings(**values: Any) -> dict[str, Any]:
    done = translate(values, frozenset(values))
    assert not done.refused, done.refused
    return done.settings


def refusal(**values: Any) -> str:
    done = translate(values, frozenset(values))
    assert done.refused, done.settings
    return "; ".join(f"{name}: {why}" for name, why in done.refused.items())


def test_every_field_of_grpo_config_is_in_the_table_and_nothing_else() -> None:
    assert sorted(OF_TRL) == sorted(FIELDS)
    assert len(OF_TRL) == len(TRAINING_FIELDS) + len(GRPO_FIELDS)


@pytest.mark.slow
def test_the_fields_and_their_defaults_are_those_of_the_trl_that_is_installed() -> None:
    if importlib.util.find_spec("trl") is None:
        pytest.skip("needs trl: the extra bench")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import GRPOConfig
    defaults = {
        f.name: f.default_factory() if f.default is dataclasses.MISSING and callable(f.default_factory) else f.default
        for f in dataclasses.fields(GRPOConfig)
    }
    assert sorted(FIELDS) == sorted(defaults)
    assert {n: getattr(d, "value", d) for n, d in defaults.items()} == {n: e.default for n, e in OF_TRL.items()}


@pytest.mark.parametrize("entry", EVERY, ids=lambda entry: entry.name)
def test_a_name_is_a_setting_that_exists_or_has_a_reason(entry: Any) -> None:
    if entry.kind != "setting":
        assert len(entry.note) > 10
        assert not entry.setting
    elif entry.setting.startswith("env."):
        assert entry.setting.removeprefix("env.") in Prompts.__init__.__annotations__
    else:
        assert entry.setting in list_settings() or entry.setting in TrainConfig.model_fields


@pytest.mark.parametrize("entry", [e for e in EVERY if e.kind == "absent"], ids=lambda entry: entry.name)
def test_the_default_of_what_is_not_here_asks_for_nothing_and_another_value_is_refused(entry: Any) -> None:
    assert not translate({entry.name: entry.default}, frozenset({entry.name})).refused
    done = translate({entry.name: "something else"}, frozenset({entry.name}))
    assert entry.note in "".join(done.refused.values()) or "a table of names" in "".join(done.refused.values())


def test_trl_s_defaults_are_a_config_that_trains() -> None:
    done = translate({n: e.default for n, e in OF_TRL.items()}, frozenset())
    assert not done.refused
    nested: dict[str, Any] = {"env": "math-tools"}
    for setting, value in done.settings.items():
        section, dot, name = setting.partition(".")
        if dot:
            nested.setdefault(section, {})[name] = value
        else:
            nested[setting] = value
    nested["run"].pop("project")
    config = build_config(("TRL's defaults", nested))
    assert (config.seed, config.learner.lr_scheduler, config.learner.epsilon_high) == (42, "linear", 0.2)
    assert config.rollout.tasks_per_step == 1


@pytest.mark.parametrize(
    ("values", "ours"),
    [
        ({"num_generations": 4}, {"rollout.group_size": 4}),
        ({"scale_rewards": "group"}, {"learner.advantage": "grpo"}),
        ({"scale_rewards": True}, {"learner.advantage": "grpo"}),
        ({"scale_rewards": False}, {"learner.advantage": "dr_grpo"}),
        ({"scale_rewards": "none"}, {"learner.advantage": "dr_grpo"}),
        ({"scale_rewards": "batch"}, {"learner.advantage": "batch"}),
        ({"multi_objective_aggregation": "normalize_then_sum"}, {"learner.advantage": "gdpo"}),
        ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"}, {"learner.advantage": "gdpo"}),
        ({"multi_objective_aggregation": "sum_then_normalize"}, {"learner.advantage": "grpo"}),
        ({"mask_truncated_completions": True}, {"learner.mask_stop_reasons": ["max_tokens"]}),
        ({"per_device_train_batch_size": 16}, {"rollout.tasks_per_step": 2}),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6}, {"rollout.tasks_per_step": 3}),
        ({"generation_batch_size": 32, "gradient_accumulation_steps": 4}, {"rollout.tasks_per_step": 4}),
        ({"max_steps": -1}, {}),
        (
            {"per_device_train_batch_size": 3, "num_generations": 6, "gradient_accumulation_steps": 2},
            {"rollout.tasks_per_step": 1, "rollout.group_size": 6},
        ),
        (
            {"per_device_train_batch_size": 4, "steps_per_generation": 4},
            {"rollout.tasks_per_step": 2, "learner.steps_per_generation": 4},
        ),
        (
            {"generation_batch_size": 32, "gradient_accumulation_steps": 2},
            {"rollout.tasks_per_step": 4, "learner.steps_per_generation": 2},
        ),
        (
            {"max_steps": 12, "steps_per_generation": 3, "num_iterations": 2},
            {"steps": 2, "rollout.tasks_per_step": 3, "learner.steps_per_generation": 3, "learner.num_iterations": 2},
        ),
        ({"num_train_epochs": 2}, {"epochs": 2.0}),
        ({"num_train_epochs": 2, "max_steps": 9}, {"steps": 9}),
        ({"dataset_name": "a/b", "dataset_train_split": "x"}, {"env.data": "a/b", "env.split": "x"}),
        ({"max_steps": 100}, {"steps": 100}),
        ({"max_steps": 101, "num_iterations": 2}, {"steps": 51, "learner.num_iterations": 2}),
        ({"use_vllm": True}, {"engine.name": "vllm"}),
        ({"use_vllm": False}, {"engine.name": "transformers"}),
        ({"use_vllm": True, "vllm_mode": "colocate"}, {"engine.name": "vllm"}),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": 9000},
            {"engine.name": "server", "engine.urls": ["http://127.0.0.1:9000"]},
        ),
        (
            {"vllm_mode": "server", "vllm_server_base_url": "http://a:1"},
            {"engine.name": "server", "engine.urls": ["http://a:1"]},
        ),
        ({"bf16": True}, {"learner.bf16": True}),
        ({"bf16": False}, {"learner.bf16": False}),
        ({"report_to": "none"}, {"run.trackers": []}),
        ({"report_to": ["wandb", "tensorboard"]}, {"run.trackers": ["wandb", "tensorboard"]}),
        ({"report_to": "wandb"}, {"run.trackers": ["wandb"]}),
        ({"lr_scheduler_type": "constant_with_warmup"}, {"learner.lr_scheduler": "constant_with_warmup"}),
        ({"lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, {"learner.lr_scheduler_args": {"min_lr_rate": 0.1}}),
        ({"lr_scheduler_kwargs": '{"power": 2}'}, {"learner.lr_scheduler_args": {"power": 2}}),
        ({"warmup_steps": 5}, {"learner.warmup_steps": 5}),
        ({"warmup_steps": 0.1}, {"learner.warmup_ratio": 0.1}),
        ({"warmup_ratio": 0.1}, {"learner.warmup_ratio": 0.1}),
        ({"adam_beta2": 0.95}, {"learner.betas": [0.9, 0.95]}),
        ({"lr_scheduler_type": "cosine"}, {"learner.lr_scheduler": "cosine"}),
        ({"optim": "adamw_bnb_8bit"}, {"learner.optimizer": "adamw_8bit"}),
        ({"optim": "adamw_torch"}, {"learner.optimizer": "adamw"}),
        ({"epsilon": 0.1}, {"learner.epsilon": 0.1, "learner.epsilon_high": 0.1}),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, {"learner.epsilon": 0.1, "learner.epsilon_high": 0.3}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"learner.loss": "cispo", "learner.epsilon_high": 5.0}),
        ({"sync_ref_model": True}, {"learner.ref_sync_steps": 512, "learner.ref_mixup_alpha": 0.6}),
        ({"vllm_importance_sampling_correction": False}, {"learner.importance_sampling_mode": "none"}),
        ({"sync_ref_model": False, "ref_model_sync_steps": 3}, {}),
        ({"eval_strategy": "no"}, {"eval.every": 0}),
        ({"eval_strategy": "steps", "eval_steps": 5}, {"eval.every": 5}),
        ({"eval_steps": 7}, {"eval.every": 7}),
        ({"eval_strategy": "steps"}, {"eval.every": 10}),
        ({"eval_strategy": "steps", "eval_steps": 0.1, "max_steps": 50}, {"eval.every": 5, "steps": 50}),
        ({"save_strategy": "no"}, {"run.save_every": 0}),
        ({"save_steps": 20}, {"run.save_every": 20}),
        ({"max_tool_calling_iterations": 3}, {"rollout.max_turns": 4}),
        ({"peft_config": {"r": 8, "lora_alpha": 16}}, {"lora.rank": 8, "lora.alpha": 16}),
        ({"peft_config": SimpleNamespace(r=4, lora_alpha=8)}, {"lora.rank": 4, "lora.alpha": 8}),
        ({"use_peft": True}, {"lora.rank": 16, "lora.alpha": 32}),
        ({"use_peft": True, "load_in_4bit": True}, {"lora.rank": 16, "lora.alpha": 32, "lora.quantize": "4bit"}),
        ({"use_peft": False, "lora_r": 8}, {}),
        ({"lora_r": 8, "lora_target_modules": "all-linear"}, None),
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, {"dtype": "bfloat16"}),
        ({"model_init_kwargs": {"torch_dtype": "torch.bfloat16", "use_cache": False}}, {"dtype": "bfloat16"}),
        ({"reward_funcs": print}, {"env.rewards": [print]}),
        ({"reward_funcs": "accuracy_reward,mine.py:f"}, {"env.rewards": ["math", "mine.py:f"]}),
        ({"reward_funcs": ["org/model", len]}, {"env.rewards": ["reward-model:org/model", len]}),
        ({"dataset_name": "trl-lib/zen", "dataset_config": "a"}, {"env.data": "trl-lib/zen:a"}),
        (
            {"top_p": 0.9, "top_k": -1, "min_p": None, "repetition_penalty": 1.1},
            {"rollout.top_p": 0.9, "rollout.top_k": 0, "rollout.repetition_penalty": 1.1},
        ),
        ({"generation_kwargs": {"top_k": 50}}, {"rollout.top_k": 50}),
        ({"generation_kwargs": {"stop_strings": "a, b"}}, {"rollout.stop": ["a, b"]}),
        ({"stop": ["END", "STOP"]}, {"rollout.stop": ["END", "STOP"]}),
        ({"vllm_structured_outputs_regex": "a+"}, {"rollout.structured_outputs": {"regex": "a+"}}),
        ({"structured_outputs": {"regex": "a+"}}, {"rollout.structured_outputs": {"regex": "a+"}}),
        ({"max_completion_length": 9}, {"rollout.max_tokens": 9, "rollout.max_episode_tokens": 9}),
        ({"data.max_response_length": 9}, {"rollout.max_tokens": 9, "rollout.max_episode_tokens": 9}),
        ({"n": 4, "max_tokens": 9}, {"rollout.group_size": 4, "rollout.max_tokens": 9}),
    ],
)
def test_values_are_translated(values: dict[str, Any], ours: dict[str, Any] | None) -> None:
    made = settings(**values)
    if ours is None:
        ours = {"lora.rank": 8, "lora.alpha": 32, "lora.targets": ["all-linear"]}
    assert made == ours


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"per_device_train_batch_size": 3}, "which is no multiple of num_generations = 8"),
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
            "an optimizer step of 16 completions",
        ),
        ({"generation_batch_size": 12}, "12 is no multiple of the batch of all devices, 8"),
        ({"generation_batch_size": 8, "steps_per_generation": 2}, "one follows from the other"),
        ({"scale_rewards": "std"}, "scale_rewards: group, batch or none, not 'std'"),
        ({"multi_objective_aggregation": "max"}, "not 'max'"),
        ({"lr_scheduler_kwargs": [1]}, "a table of settings, not [1]"),
        ({"optim": "adafactor"}, "there is no optimizer 'adafactor' here; those are adamw, adamw_8bit, muon"),
        ({"report_to": "all"}, "name the trackers"),
        ({"eval_strategy": "epoch"}, "say how many steps, eval.every"),
        ({"save_strategy": "best"}, "run.save_every"),
        ({"vllm_mode": "both"}, "colocate or server, not 'both'"),
        ({"peft_config": {"r": 8, "bias": "all"}}, "peft_config.bias: there is no such setting here"),
        ({"peft_config": 3}, "peft_config: a table of names, not 3"),
        ({"peft_config": {"r": 8, "lora_dropout": 0.1}}, "lora_dropout: adapters have no dropout"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs.num_beams: there is no such setting here"),
        ({"logit_bias": {"5": 1.0}}, "the learner has no counterpart of it"),
        ({"stop_token_ids": [5]}, "a turn ends at the model's own end tokens"),
        ({"max_completion_length": 0}, "a whole number from 1 on, not 0"),
        ({"num_generations": 8, "n": 4}, "rollout.group_size is given by num_generations too, as 8"),
        ({"per_device_train_batch_size": "many"}, "per_device_train_batch_size: a number, not 'many'"),
        ({"per_device_train_batch_size": 0}, "a whole number from 1 on, not 0"),
        ({"torch_dtype": "float16"}, "weights are in float32 or bfloat16, not in float16"),
        ({"resume_from_checkpoint": "x/checkpoint-5"}, "agentrl train --resume RUN"),
    ],
)
def test_values_without_a_counterpart_are_refused_with_the_way_out(values: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(**values)


@pytest.mark.parametrize(
    ("values", "ours"),
    [
        ({"actor_rollout_ref.rollout.n": 5}, {"rollout.group_size": 5}),
        ({"rollout.n": 5}, {"rollout.group_size": 5}),
        ({"data.train_batch_size": 64}, {"rollout.tasks_per_step": 64}),
        (
            {"data.train_batch_size": 64, "actor_rollout_ref.actor.ppo_mini_batch_size": 64},
            {"rollout.tasks_per_step": 64},
        ),
        ({"algorithm.adv_estimator": "grpo"}, {"learner.advantage": "grpo"}),
        ({"algorithm.adv_estimator": "rloo"}, {"learner.advantage": "rloo"}),
        ({"algorithm.norm_adv_by_std_in_grpo": False}, {"learner.advantage": "dr_grpo"}),
        ({"actor.clip_ratio_high": 0.28}, {"learner.epsilon_high": 0.28}),
        ({"actor.clip_ratio": 0.1}, {"learner.epsilon": 0.1, "learner.epsilon_high": 0.1}),
        ({"kl_loss_coef": 0.01}, {"learner.beta": 0.01}),
        ({"kl_loss_coef": 0.01, "use_kl_loss": False}, {"learner.beta": 0.0}),
        ({"loss_agg_mode": "seq-mean-token-mean"}, {"learner.loss": "grpo"}),
        ({"trainer.save_freq": -1, "trainer.test_freq": 5}, {"run.save_every": 0, "eval.every": 5}),
        ({"trainer.logger": ["console", "wandb"]}, {"run.trackers": ["wandb"]}),
        ({"rollout.name": "hf"}, {"engine.name": "transformers"}),
        ({"actor.ppo_micro_batch_size_per_gpu": 4}, {}),
        ({"router_replay.mode": "R3", "enable_rollout_routing_replay": True}, {"learner.router_replay": True}),
        ({"actor_rollout_ref.actor.router_replay.mode": "disabled"}, {"learner.router_replay": False}),
        ({"enable_return_routed_experts": True}, {}),
    ],
)
def test_verl_s_names_are_read_by_their_paths_and_by_the_ends_of_these(
    values: dict[str, Any], ours: dict[str, Any]
) -> None:
    assert settings(**values) == ours


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"algorithm.adv_estimator": "gae"}, "no critic is trained"),
        ({"critic.optim.lr": 1e-4}, "no critic is trained"),
        ({"loss_agg_mode": "other"}, "there is no loss that sums tokens by other"),
        ({"data.train_batch_size": 64, "ppo_mini_batch_size": 24}, "24 prompts at a time do not make up the 64"),
        ({"rollout.name": "sglang"}, "there is no engine 'sglang' here"),
        ({"tensor_parallel_size": 2}, "agentrl serve has --tp"),
        ({"router_replay.mode": "R2"}, "experts are replayed as the engine chose them, R3, or not at all"),
        ({"router_replay.record_file": "experts.pt"}, "what was chosen is in memory, and in a run's checkpoints"),
    ],
)
def test_what_verl_and_vllm_have_and_this_has_not_is_refused(values: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(**values)


def test_a_batch_counts_the_processes_that_train() -> None:
    done = translate({"per_device_train_batch_size": 8}, frozenset({"per_device_train_batch_size"}), processes=4)
    assert done.settings == {"rollout.tasks_per_step": 4}


def test_a_loss_without_a_clip_is_given_none_by_default() -> None:
    given = {n: e.default for n, e in OF_TRL.items()} | {"loss_type": "sapo"}
    assert "learner.epsilon" not in translate(given, frozenset({"loss_type"})).settings


@pytest.mark.parametrize(
    ("text", "value"),
    [("True", True), ("false", False), ("None", None), ("1e-6", 1e-6), ("5E-7", 5e-7), ("none", "none")],
)
def test_text_is_read_as_other_libraries_write_it(text: str, value: object) -> None:
    assert _read_value(text) == value


def test_a_name_is_found_with_dashes_and_not_by_a_word_alone() -> None:
    assert find_name("num-generations") is find_name("num_generations")
    assert find_name("path") is None
    assert find_name("lr") is None
