"""A policy in shards that nobody has whole, lent to engines and written: run by torchrun, or alone as its twin.

python -m tests.helpers.lent OUT FOLDER CASE ...: the weights after an update, as an engine reads them, before and
after others were loaded; the model's folder. A case is such as ``full-tied-float32``; ``large`` is a model of 0.6 GB,
and what each process needed beside it.
"""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from agentrl.engines.vllm.lora_sender import select_weights
from agentrl.learner.distributed import ProcessGroup, init_process_group
from agentrl.learner.learner import Learner, LossSettings
from agentrl.models import memory_file
from agentrl.models.checkpoint_layers import iterate_layers, measure_layer
from agentrl.models.policy import Policy, load_tokenizer
from tests.helpers.sharded import build_policy, descend
from tests.helpers.tiny import qwen3
from tests.learner.test_hidden_states import alike


def lend(case: str, group: ProcessGroup, folder: Path) -> dict[str, Any]:
    adapter, head, dtype = case.split("-")
    policy = build_policy(adapter, head, getattr(torch, dtype))
    settings = LossSettings(threads=1, max_grad_norm=1e9)  # tokens of a micro-batch are measured
    learner = Learner(policy, descend(0.1), settings, group, "full", keeps_whole=False)
    if group.is_worker:
        learner.run_worker()
        return {}
    weights = select_weights(policy)
    weights.lender = learner.lent
    found: dict[str, Any] = {"tokens": (learner.update(alike(3)), learner.affordable_tokens)[1]}
    announced = [(m.name, m.dtype, m.shape) for m in weights.metadata]
    found["files"] = [file.path for file in weights.files()]
    found["sent"] = {n: t.clone() for path in found["files"] for n, t in load_file(path).items()}
    found["streamed"] = dict(weights)
    assert sorted(announced) == sorted((n, t.dtype, tuple(t.shape)) for n, t in found["sent"].items())
    some = weights.lender.gather_layers() if weights.lender else iter(())
    next(some, None)
    del some  # who reads no further does not stop the others
    kept = learner.copy_weights()
    with learner.use_weights({n: torch.zeros_like(t) for n, t in kept.items()}):
        weights.replace(policy)
        found["zeroed"] = read(weights)
    weights.replace(policy)
    found["again"] = read(weights)
    Policy(policy, load_tokenizer("nano"), "tiny").save(folder / case, learner.lent)
    learner.load_weights({n: torch.zeros_like(t) for n, t in kept.items()})
    learner.load_weights(kept)
    found["restored"] = learner.copy_weights()
    found["kept"] = kept
    group.broadcast(None)
    return found


def read(weights: Any) -> dict[str, Tensor]:
    return dict(chain.from_iterable(load_file(file.path).items() for file in weights.files()))


def measure(group: ProcessGroup) -> dict[str, Any]:
    """Lend a large model; return the bytes of its largest layer, and those that each process needed beside its own."""
    policy = qwen3(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8, head_dim=128)
    layers = [measure_layer(layer) for layer in iterate_layers(policy, lambda p: p)]
    learner = Learner(policy, descend(0.1), LossSettings(threads=1), group, "full", keeps_whole=False)
    assert learner.lent is not None
    Path("/proc/self/clear_refs").write_text("5")  # the most that was ever resident is forgotten
    before = read_status("VmRSS")
    files = learner.lent._write()
    grown = group.all_gather(read_status("VmHWM") - before)
    return {"layer": max(layers), "all": sum(layers), "grown": grown, "files": len(files)}


def read_status(name: str) -> int:
    """Read a number of bytes that the system tells of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def main() -> None:
    out, folder, *cases = sys.argv[1:]
    if cases == ["large"]:
        group = init_process_group()
        found = measure(group)
        if not group.is_worker:
            torch.save(found, out)
        group.destroy()
        return
    memory_file.PART_BYTES = 4000
    group = init_process_group()
    found = {case: lend(case, group, Path(folder)) for case in cases}
    if not group.is_worker:
        torch.save(found, out)
    group.destroy()


if __name__ == "__main__":
    main()
