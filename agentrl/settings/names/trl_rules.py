"""TRL's names that make a setting together: each rule reads several of them, and returns settings here.

A rule raises ConfigError, which begins with the name, where the values contradict each other or have no counterpart.
"""

from __future__ import annotations

from math import ceil

from agentrl.errors import ConfigError
from agentrl.settings.names.values import JointRule, Settings, Values


def _batch(v: Values) -> Settings:
    """Return the tasks of a step, those of a generation batch, and the optimizer steps that it is cut into."""
    completions, group = _count_completions(v), v.whole("num_generations")
    if completions % group:
        raise ConfigError(
            f"per_device_train_batch_size: {completions} completions are sampled together (with all devices and "
            f"steps_per_generation), which is no multiple of num_generations = {group}"
        )
    settings: Settings = {"rollout.tasks_per_step": completions // group}
    updates = _count_updates(v)
    return settings | ({"learner.steps_per_generation": updates} if updates > 1 else {})


def _count_completions(v: Values) -> int:
    """Return the completions that are sampled together."""
    size = v.whole("per_device_train_batch_size") * v.processes
    if v["generation_batch_size"] is None:
        steps = "gradient_accumulation_steps" if v["steps_per_generation"] is None else "steps_per_generation"
        return size * v.whole(steps)
    if v["steps_per_generation"] is not None:
        raise ConfigError("generation_batch_size and steps_per_generation: one follows from the other; give one")
    completions = v.whole("generation_batch_size")
    if completions % size:
        raise ConfigError(f"generation_batch_size: {completions} is no multiple of the batch of all devices, {size}")
    return completions


def _count_updates(v: Values) -> int:
    """Return the optimizer steps that a batch is cut into, in one pass over it."""
    window = v.whole("per_device_train_batch_size") * v.processes * v.whole("gradient_accumulation_steps")
    completions = _count_completions(v)
    if completions < window or completions % window:
        raise ConfigError(
            f"gradient_accumulation_steps: an optimizer step of {window} completions is no part of the {completions} "
            "that are sampled together; let it divide steps_per_generation"
        )
    return completions // window


def _steps(v: Values) -> Settings:
    """Return the steps, or the epochs: TRL counts optimizer steps, of which a batch here has several."""
    if v["max_steps"] is None or v.number("max_steps") <= 0:
        return {"epochs": float(v.number("num_train_epochs"))} if "num_train_epochs" in v.given else {}
    return {"steps": ceil(v.whole("max_steps") / (v.whole("num_iterations") * _count_updates(v)))}


def _advantage(v: Values) -> Settings:
    scale = {True: "group", False: "none"}.get(v["scale_rewards"], v["scale_rewards"])  # type: ignore[call-overload]
    names = {"group": "grpo", "none": "dr_grpo", "batch": "batch"}
    if scale not in names:
        raise ConfigError(f"scale_rewards: group, batch or none, not {scale!r}")
    if v["multi_objective_aggregation"] == "normalize_then_sum":
        return {"learner.advantage": "gdpo"}
    if v["multi_objective_aggregation"] != "sum_then_normalize":
        raise ConfigError(
            "multi_objective_aggregation: sum_then_normalize or normalize_then_sum, not "
            f"{v['multi_objective_aggregation']!r}"
        )
    return {"learner.advantage": names[str(scale)]}


def _clip(v: Values) -> Settings:
    """Return both clips. A loss that has none ignores TRL's defaults, so they are not set for it."""
    loss = v["loss_type"]
    low, high = v["epsilon"], v["epsilon_high"]
    settings: Settings = {}
    if loss not in ("cispo", "sapo", "vespo") or "epsilon" in v.explicit:
        settings["learner.epsilon"] = low
    if high is not None:
        return settings | {"learner.epsilon_high": high}
    return settings if loss in ("cispo", "sapo", "vespo") else settings | {"learner.epsilon_high": low}


def _engine(v: Values) -> Settings:
    mode = v["vllm_mode"]
    if mode not in ("colocate", "server"):
        raise ConfigError(f"vllm_mode: colocate or server, not {mode!r}")
    servers = {"vllm_server_base_url", "vllm_server_host", "vllm_server_port"}
    if "use_vllm" in v.explicit and not v["use_vllm"]:
        return {"engine.name": "transformers"}
    if not v["use_vllm"] and not v.explicit & (servers | {"vllm_mode"}):
        return {}
    if mode == "colocate" and not v.explicit & servers:
        return {"engine.name": "vllm"}
    url = v["vllm_server_base_url"]
    host = "127.0.0.1" if v["vllm_server_host"] == "0.0.0.0" else v["vllm_server_host"]
    return {"engine.name": "server", "engine.urls": [url or f"http://{host}:{v['vllm_server_port']}"]}


def _correction(v: Values) -> Settings:
    if v["vllm_importance_sampling_correction"]:
        return {}
    return {"learner.importance_sampling_mode": "none"}


def _evaluation(v: Values) -> Settings:
    strategy, every = str(getattr(v["eval_strategy"], "value", v["eval_strategy"])), v["eval_steps"]
    if strategy == "no" and "eval_strategy" not in v.explicit and "eval_steps" in v.explicit:
        strategy = "steps"
    if strategy not in ("no", "steps"):
        raise ConfigError(f"eval_strategy: no or steps, not {strategy!r}: say how many steps, eval.every")
    if strategy == "no":
        return {"eval.every": 0}
    every = v["logging_steps"] if every is None else every
    if isinstance(every, float) and every < 1:
        every = every * v.whole("max_steps") if v.number("max_steps") > 0 else every
    if not isinstance(every, int | float) or every < 1:
        raise ConfigError(f"eval_steps: the steps between evaluations, not {every!r}: say eval.every")
    return {"eval.every": int(every)}


def _saving(v: Values) -> Settings:
    strategy, every = str(getattr(v["save_strategy"], "value", v["save_strategy"])), v["save_steps"]
    if strategy not in ("no", "steps"):
        raise ConfigError(f"save_strategy: no or steps, not {strategy!r}: say how many steps, run.save_every")
    if strategy == "no":
        return {"run.save_every": 0}
    if not isinstance(every, int | float) or every < 1:
        raise ConfigError(f"save_steps: the steps between checkpoints, not {every!r}: say run.save_every")
    return {"run.save_every": int(every)}


def _reference(v: Values) -> Settings:
    if not v["sync_ref_model"]:
        return {}
    return {
        "learner.ref_sync_steps": v.whole("ref_model_sync_steps"),
        "learner.ref_mixup_alpha": v.number("ref_model_mixup_alpha"),
    }


def _adapter(v: Values) -> Settings:
    if "use_peft" in v.explicit and not v["use_peft"]:
        return {}
    settings: Settings = {"lora.rank": v["lora_r"], "lora.alpha": v["lora_alpha"]}
    return settings | ({"lora.quantize": "4bit"} if v["load_in_4bit"] else {})


def _dataset(v: Values) -> Settings:
    config = v["dataset_config"]
    return {"env.data": f"{v['dataset_name']}:{config}" if config else v["dataset_name"]}


def _warmup(v: Values) -> Settings:
    steps = v.number("warmup_steps")
    return {"learner.warmup_ratio": steps} if 0 < steps < 1 else {"learner.warmup_steps": int(steps)}


def _betas(v: Values) -> Settings:
    return {"learner.betas": [v.number("adam_beta1"), v.number("adam_beta2")]}


def _length(v: Values) -> Settings:
    """Return the limits of an episode and of a turn: TRL's completion is all behind the prompt, of all turns."""
    tokens = v.whole("max_completion_length")
    return {"rollout.max_tokens": tokens, "rollout.max_episode_tokens": tokens}


def _resume(v: Values) -> Settings:
    where = v["resume_from_checkpoint"]
    if isinstance(where, str):
        raise ConfigError(f"resume_from_checkpoint: agentrl train --resume RUN, the run's folder, not {where!r}")
    return {"run.resume": bool(where)}


_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation")
TRL_RULES: tuple[JointRule, ...] = (
    JointRule(_BATCH, _batch, ("num_generations",)),
    JointRule(("max_steps", "num_train_epochs"), _steps, ("num_iterations", *_BATCH)),
    JointRule(("scale_rewards", "multi_objective_aggregation"), _advantage),
    JointRule(("epsilon", "epsilon_high"), _clip, ("loss_type",)),
    JointRule(("use_vllm", "vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"), _engine),
    JointRule(("vllm_importance_sampling_correction",), _correction),
    JointRule(("eval_strategy", "eval_steps"), _evaluation, ("logging_steps", "max_steps")),
    JointRule(("save_strategy", "save_steps"), _saving),
    JointRule(("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"), _reference),
    JointRule(("use_peft", "lora_r", "lora_alpha", "load_in_4bit"), _adapter),
    JointRule(("warmup_steps",), _warmup),
    JointRule(("max_completion_length",), _length),
    JointRule(("adam_beta1", "adam_beta2"), _betas),
    JointRule(("dataset_name", "dataset_config"), _dataset),
    JointRule(("resume_from_checkpoint",), _resume),
)
