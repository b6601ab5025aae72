"""Configuration files beside a script: the YAML of ``trl grpo``, DeepSpeed's JSON, accelerate's YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from agentrl.errors import UserError
from agentrl.migration.functions import name_shipped
from agentrl.migration.plan import UNKNOWN, Plan
from agentrl.migration.shards import read_fsdp, read_offload, read_stage, read_zero
from agentrl.settings.names.translation import find_name

_LARGEST = 2_000_000  # bytes
_TO_GIVE = {"env.rewards": [f"{UNKNOWN}.py:reward"], "env.data": f"{UNKNOWN}.jsonl", "model": f"./{UNKNOWN}"}
_ACCELERATE = {"fsdp_config", "distributed_type", "compute_environment", "num_machines", "deepspeed_config"}
_READ = {"num_processes", "mixed_precision", "deepspeed_config", "fsdp_config"}
_OF_NO_CONSEQUENCE = {
    *("compute_environment", "debug", "machine_rank", "main_training_function", "rdzv_backend", "same_network"),
    *(
        "tpu_env",
        "tpu_use_cluster",
        "tpu_use_sudo",
        "use_cpu",
        "downcast_bf16",
        "main_process_port",
        "distributed_type",
    ),
    *(
        "main_process_ip",
        "enable_cpu_affinity",
        "deepspeed_multinode_launcher",
        "steps_per_print",
        "wall_clock_breakdown",
    ),
    *("steps_per_print", "wall_clock_breakdown", "train_batch_size", "gpu_ids"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
}


def read_config_file(path: Path, plan: Plan) -> None:
    """Add what a YAML or JSON file says to a plan; whose it is is seen by its entries.

    Raises:
        UserError: it cannot be read, or holds no table.
    """
    table = _load(path)
    if _ACCELERATE & table.keys():
        _read_accelerate(table, plan, path)
    elif "zero_optimization" in table or "train_micro_batch_size_per_gpu" in table or path.suffix == ".json":
        read_deepspeed(table, plan)
    else:
        _read_trl(table, plan, path)


def _load(path: Path) -> Mapping[str, object]:
    try:
        if path.stat().st_size > _LARGEST:
            raise UserError(f"{path} is no configuration: it has {path.stat().st_size:,} bytes, over {_LARGEST:,}")
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if path.suffix == ".json" else _parse_yaml(text)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(table, Mapping) or not all(isinstance(k, str) for k in table):
        raise UserError(f"{path} holds no table of settings, but {table!r:.60}")
    return table


def _parse_yaml(text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _read_trl(table: Mapping[str, object], plan: Plan, path: Path) -> None:
    """Read the YAML of ``trl grpo --config``."""
    plan.set("env.name", "prompts", "a dataset with reward functions")
    for name, value in table.items():
        if name == "reward_funcs":
            names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
            plan.set("env.rewards", [name_shipped(str(n)) for n in names], "reward_funcs")
        elif name == "reward_model_name_or_path" and value:
            plan.set("env.rewards", [f"reward-model:{value}"], name)
        elif name == "model_name_or_path":
            plan.set("model", value, name)
        elif name == "datasets":
            _read_mixture(value, plan)
        elif name == "dtype":
            plan.values["torch_dtype"] = value
        elif name == "env":
            plan.notes.append("env: variables of the environment are the shell's own")
        elif find_name(name) is None:
            plan.todo.append(f"{name}: TRL 1.16 has no such name, nor has agentrl [{path}]")
        else:
            plan.values[name] = value
    if not plan.values.get("use_peft"):
        plan.values = {n: v for n, v in plan.values.items() if not n.startswith("lora_")}
    for setting in ("env.rewards", "env.data", "model"):
        if setting not in plan.settings and not (setting == "env.data" and "dataset_name" in plan.values):
            plan.set(setting, _TO_GIVE[setting], "")
            plan.todo.append(f"{setting}: the file names none")


def _read_mixture(value: object, plan: Plan) -> None:
    first = value[0] if isinstance(value, list) and len(value) == 1 else None
    files = first.get("data_files") if isinstance(first, Mapping) else None
    if isinstance(first, Mapping) and isinstance(files, str):
        plan.set("env.data", files, "datasets")
    elif isinstance(first, Mapping) and first.get("path"):
        plan.set("env.data", ":".join(str(p) for p in (first["path"], first.get("name")) if p), "datasets")
    else:
        plan.set("env.data", f"{UNKNOWN}.jsonl", "")
        plan.todo.append("datasets: a mixture is one file here: write its rows together, and set env.data")


def read_deepspeed(table: Mapping[str, object], plan: Plan) -> None:
    """Read DeepSpeed's configuration: batch, clip, precision, shards, optimizer and schedule have counterparts."""
    names = {
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "max_grad_norm",
    }
    for key, value in table.items():
        inner = value if isinstance(value, Mapping) else {}
        if key in names:
            _add(plan, names[key], value)
        elif key in ("bf16", "fp16"):
            _add(plan, key, inner.get("enabled"))
        elif key == "optimizer":
            _read_optimizer(inner, plan)
        elif key == "scheduler":
            _read_scheduler(inner, plan)
        elif key == "zero_optimization":
            read_zero(inner, plan, "ZeRO stage")
        elif key not in _OF_NO_CONSEQUENCE:
            plan.notes.append(f"DeepSpeed's {key} has no counterpart")


def _read_optimizer(table: Mapping[str, object], plan: Plan) -> None:
    kind = str(table.get("type", "AdamW"))
    if kind.lower() not in ("adam", "adamw"):
        plan.todo.append(f"DeepSpeed's optimizer {kind}: optimizers here are adamw, adamw_8bit and muon, or your own")
    given = table.get("params")
    params = given if isinstance(given, Mapping) else {}
    betas = params.get("betas")
    if isinstance(betas, list) and len(betas) == 2:
        _add(plan, "adam_beta1", betas[0])
        _add(plan, "adam_beta2", betas[1])
    for theirs, name in (("lr", "learning_rate"), ("eps", "adam_epsilon"), ("weight_decay", "weight_decay")):
        _add(plan, name, params.get(theirs))


def _read_scheduler(table: Mapping[str, object], plan: Plan) -> None:
    kinds = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    kind = str(table.get("type"))
    if kind not in kinds:
        plan.todo.append(f"DeepSpeed's scheduler {kind} has no counterpart; learner.lr_scheduler names one")
        return
    _add(plan, "lr_scheduler_type", kinds[kind])
    given = table.get("params")
    _add(plan, "warmup_steps", given.get("warmup_num_steps") if isinstance(given, Mapping) else None)


def _add(plan: Plan, name: str, value: object) -> None:
    """Add a value, unless it is DeepSpeed's ``auto`` or the script has given one."""
    if value not in (None, "auto"):
        plan.values.setdefault(name, value)


def _read_accelerate(table: Mapping[str, object], plan: Plan, path: Path) -> None:
    """Read accelerate's configuration: processes, precision and shards have counterparts."""
    count = table.get("num_processes")
    if isinstance(count, int) and count > 1:
        plan.processes = count
        plan.notes.append(f"{count} processes: torchrun --nproc_per_node {count} -m agentrl train FILE.toml")
    if table.get("mixed_precision") in ("bf16", "fp16"):
        _add(plan, str(table["mixed_precision"]), True)
    fsdp = table.get("fsdp_config")
    if isinstance(fsdp, Mapping):
        read_fsdp(fsdp, plan)
    nested = table.get("deepspeed_config")
    if isinstance(nested, Mapping):
        _read_nested(nested, plan, path)
    for key in sorted(table.keys() - _OF_NO_CONSEQUENCE - _READ):
        if table[key] not in (None, {}, [], "", 1, False):
            plan.notes.append(f"accelerate's {key} has no counterpart")


def _read_nested(table: Mapping[str, object], plan: Plan, path: Path) -> None:
    for key, value in table.items():
        if key in ("gradient_accumulation_steps", "gradient_clipping"):
            _add(plan, {"gradient_clipping": "max_grad_norm"}.get(key, key), value)
        elif key == "deepspeed_config_file":
            read_deepspeed(_load(path.parent / str(value)), plan)
        elif key == "zero_stage":
            read_stage(value, plan, "ZeRO stage")
        elif key.startswith("offload_"):
            read_offload(key.removesuffix("_device"), value, plan)
        elif key not in _OF_NO_CONSEQUENCE and value not in (None, "none", False):
            plan.notes.append(f"DeepSpeed's {key} = {value} has no counterpart")
