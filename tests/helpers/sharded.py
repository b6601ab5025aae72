"""Updates of a policy in shards, to be compared with those of one process: run by torchrun, or alone.

python -m tests.helpers.sharded OUT DTYPE CASE ...: what each case changed of the weights, by a step of SGD whose rate
is 1, so that it is the gradient; written by rank 0. A case is such as ``lora-prefix-tied-beta``. With ``go-on FOLDER
CASE`` for the last, such as ``full-muon-float32``, the weights of a third update, behind two that were saved.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from agentrl.learner.distributed import ProcessGroup, init_process_group
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.optimizers import make_optimizers
from agentrl.learner.part_writer import PartCheck, check_parts
from agentrl.learner.sharding import read_local
from agentrl.models.lora import keep_differentiable
from agentrl.training import checkpoint
from agentrl.types import RoutedExperts, Sample
from tests.helpers.tiny import qwen3
from tests.learner.test_hidden_states import alike
from tests.learner.test_router_balance import build

ADAPTERS, PACKINGS, HEADS = ("full", "lora"), ("prefix", "padded"), ("tied", "untied")
TERMS: dict[str, dict[str, Any]] = {
    "beta": {"beta": 0.1},
    "entropy": {"entropy_coef": 0.01},
    "quantile": {"top_entropy_quantile": 0.5},
    "iterations": {"num_iterations": 2},
}
MORE_TERMS: dict[str, dict[str, Any]] = {
    "balance": {"router_aux_loss_coef": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "offload": {"param_offload": True},
    "replay": {"router_replay": True},
}
EVERY = ["-".join(case) for case in product(ADAPTERS, PACKINGS, HEADS, TERMS)]
BESIDE = [
    "moe-prefix-untied-balance",
    "moe-prefix-untied-replay",
    "moe-padded-untied-replay",
    "full-prefix-tied-checkpointing",
    "full-padded-tied-bf16",
    "full-prefix-tied-offload",
    "lora-padded-untied-offload",
    "qlora-prefix-tied-beta",
    "qlora-padded-untied-entropy",
    "qlora-prefix-untied-checkpointing",
]
PAIRWISE = [  # each pair of choices is in one of them
    *("full-prefix-tied-beta", "full-padded-untied-entropy", "lora-prefix-untied-quantile", "lora-padded-tied-beta"),
    *("full-padded-tied-quantile", "full-prefix-untied-iterations", "lora-prefix-tied-entropy"),
    *("lora-padded-untied-iterations", "full-padded-untied-beta", "lora-padded-untied-quantile"),
    *("full-prefix-tied-iterations", "full-prefix-tied-quantile", "full-prefix-tied-entropy"),
]


def descend(lr: float) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    """Return the maker of an optimizer whose step is the gradient."""
    return lambda policy: [torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=lr)]


def build_policy(adapter: str, head: str, dtype: torch.dtype) -> Any:
    policy = (build("qwen3_moe") if adapter == "moe" else qwen3(tie_word_embeddings=head == "tied")).to(dtype).eval()
    if adapter == "qlora":
        policy = in_4_bits(policy, dtype)
    elif adapter != "lora":
        return policy
    torch.manual_seed(1)
    policy = get_peft_model(policy, LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:  # else it begins as nothing, and nothing flows into the other
            nn.init.normal_(parameter, std=0.1)
    return policy


def in_4_bits(policy: Any, dtype: torch.dtype) -> Any:
    """Return the policy with its layers in 4 bits, as transformers makes them of weights that it loads."""
    for name, layer in list(policy.model.named_modules()):
        if isinstance(layer, nn.Linear):
            small = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, layer.bias is not None, dtype)
            small.weight = bitsandbytes.nn.Params4bit(layer.weight.data, quant_type="nf4", module=small).to("cpu")
            small.bias = layer.bias
            policy.model.set_submodule(name, small)
    policy.is_loaded_in_4bit = True
    return keep_differentiable(policy).eval()


def learn(case: str, dtype: torch.dtype, group: ProcessGroup, sharding: str = "full") -> dict[str, Any]:
    """Make an update in every process; return what it changed, its metrics, and the share of bytes in this one."""
    adapter, packing, head, term = case.split("-")
    policy = build_policy(adapter, head, dtype)
    whole = sum(p.nbytes for p in policy.parameters())
    settings = LossSettings(threads=1, max_tokens_per_microbatch=100, max_grad_norm=1e9, packing=packing)
    terms = {**TERMS, **MORE_TERMS}
    lr = 1e-3 if term == "iterations" else 1.0
    before = {n: p.detach().clone() for n, p in policy.named_parameters() if p.requires_grad}
    learner = Learner(policy, descend(lr), replace(settings, **terms[term]), group, sharding)
    share = sum(read_local(p).nbytes for p in learner.train_state.policy.parameters()) / whole
    if group.is_worker:
        learner.run_worker()
        return {"share": share}
    metrics = learner.update([force_experts(row) for row in alike(3)] if term == "replay" else alike(3))
    group.broadcast(None)
    changed = {n: (before[n] - p.detach()) / lr for n, p in policy.named_parameters() if n in before}
    return {"changed": changed, "metrics": metrics, "share": share, "old": learner.old_logprobs}


def force_experts(row: Sample) -> Sample:
    """Return a row whose tokens go to experts that depend on the token alone: rows that share it share them."""
    flat = [(token + layer + n) % 4 for token in row.token_ids[:-1] for layer in range(3) for n in (0, 1)]
    return replace(row, routed_experts=[(0, RoutedExperts(array("B", flat), 3, 2))])


def go_on(folder: Path, case: str, group: ProcessGroup, sharding: str) -> dict[str, Any]:
    """Make two updates and save; or load what another number of processes saved then, and make the third."""
    adapter, optimizer, dtype = case.split("-")
    found = None
    if group.is_worker:
        while isinstance(message := group.receive(), PartCheck):
            check_parts(group, message)
    else:
        found = checkpoint.load(folder, group, by_parts=group.world_size > 1)
        group.broadcast("ready")
    policy = build_policy(adapter, "tied", getattr(torch, dtype))
    settings = LossSettings(threads=1, max_tokens_per_microbatch=100, beta=0.1)
    learner = Learner(policy, lambda p: make_optimizers(p, optimizer, 1e-3), settings, group, sharding)
    if group.is_worker:
        learner.run_worker()
        return {}
    if found is None:
        for seed in (1, 2):
            learner.update(alike(seed))
        checkpoint.save(folder, 2, checkpoint.encode_state({"learner": learner.state()}), parts=learner.part_writer)
        if learner.part_writer is not None:
            learner.part_writer.release()
    else:
        learner.load(found[1]["learner"])
    learner.update(alike(3))
    group.broadcast(None)
    return {n: p.detach().clone() for n, p in policy.named_parameters()}


def main() -> None:
    out, dtype, *cases = sys.argv[1:]
    group = init_process_group()
    sharding = os.environ.get("SHARDING", "full")
    if sharding == "hybrid":
        os.environ["LOCAL_WORLD_SIZE"] = "2"  # as on machines of two
    if dtype == "go-on":
        found = go_on(Path(cases[0]), cases[1], group, sharding)
        if not group.is_worker:
            torch.save(found, out)
        group.destroy()
        return
    learned = {case: learn(case, getattr(torch, dtype), group, sharding) for case in cases}
    shares = group.all_gather({case: one["share"] for case, one in learned.items()})
    if not group.is_worker:
        torch.save({"found": learned, "shares": shares}, out)
    group.destroy()


if __name__ == "__main__":
    main()
