"""Shards and offloading, as DeepSpeed's ZeRO and accelerate's FSDP say them, in settings here."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.migration.plan import Plan

_STRATEGIES = {  # FSDP's, by name and by torch's number
    **dict.fromkeys(("FULL_SHARD", "1"), "full"),
    **dict.fromkeys(("SHARD_GRAD_OP", "2"), "full"),
    **dict.fromkeys(("NO_SHARD", "3"), "none"),
    **dict.fromkeys(("HYBRID_SHARD", "4"), "hybrid"),
    **dict.fromkeys(("HYBRID_SHARD_ZERO2", "5"), "hybrid"),
}
_STAGES = {
    "0": "none",
    "1": "full",
    "2": "full",
    "3": "full",
}  # a part of weights and gradients too is the least memory
_OPTIMIZER_AWAY = (
    "the optimizer is kept on the CPU while the engine samples, where both are on one GPU: learner.optimizer_offload"
)
_PARAMS_AWAY = "where several GPUs learn, learner.param_offload has the shards on the CPU, and steps them there"
_BY_ITSELF = {
    *("auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "backward_prefetch", "forward_prefetch"),
    *("use_orig_params", "sync_module_states", "state_dict_type", "cpu_ram_efficient_loading", "version"),
}


def read_zero(table: Mapping[str, object], plan: Plan, what: str) -> None:
    """Read ``zero_optimization``: its stage, and what it keeps elsewhere."""
    parts = table.get("zero_hpz_partition_size") or table.get("mics_shard_size")
    read_stage(table.get("stage", 0), plan, what, hybrid=isinstance(parts, int) and parts > 1)
    for name in ("offload_optimizer", "offload_param"):
        inner = table.get(name)
        read_offload(name, inner.get("device") if isinstance(inner, Mapping) else None, plan)


def read_stage(stage: object, plan: Plan, what: str, *, hybrid: bool = False) -> None:
    """Set the shards that a stage of ZeRO stands for."""
    if stage in (None, "auto"):
        return
    known = _STAGES.get(str(stage))
    if known is None:
        plan.todo.append(f"{what} {stage!r}: ZeRO has stages 0 to 3; learner.sharding says what processes hold")
        return
    plan.set("learner.sharding", "hybrid" if hybrid and known == "full" else known, f"{what} {stage}")


def read_offload(name: str, device: object, plan: Plan) -> None:
    """Say what becomes of an offload."""
    if device in (None, "none", False):
        return
    if name.startswith("offload_optimizer"):
        plan.notes.append(f"DeepSpeed's {name} ({device}): {_OPTIMIZER_AWAY}")
    elif str(device) == "cpu":
        plan.notes.append(f"DeepSpeed's {name}: {_PARAMS_AWAY}")
    else:
        plan.notes.append(f"DeepSpeed's {name} ({device}) has no counterpart; {_PARAMS_AWAY}")


def read_fsdp(table: Mapping[str, object], plan: Plan) -> None:
    """Read accelerate's ``fsdp_config``."""
    given = {name.removeprefix("fsdp_"): value for name, value in table.items()}
    strategy = given.pop("sharding_strategy", None)
    reshards = given.pop("reshard_after_forward", None)  # of version 2: true or false; of version 1: a strategy's name
    if strategy is None and reshards is not None:
        strategy = "FULL_SHARD" if isinstance(reshards, bool) else reshards
    if strategy is not None:
        known = _STRATEGIES.get(str(strategy).upper())
        if known is None:
            plan.todo.append(f"fsdp_sharding_strategy {strategy!r}: not one that is known; see learner.sharding")
        else:
            plan.set("learner.sharding", known, f"FSDP, {strategy}")
    if given.pop("activation_checkpointing", False) is True:
        plan.values.setdefault("gradient_checkpointing", True)
    if given.pop("offload_params", False) is True:
        plan.notes.append(f"fsdp_offload_params: {_PARAMS_AWAY}")
    for name in sorted(given.keys() - _BY_ITSELF):
        if given[name] not in (None, "", False):
            plan.notes.append(f"accelerate's fsdp_{name} = {given[name]} has no counterpart")
