"""Activation memory: what a forward pass keeps for the backward pass, and how many tokens of it a machine has room for.

A tenth of a model's tokens a micro-batch costs little time; one that does not fit stops a laptop. So where no setting
says how many tokens go through the model at once, the model is measured, and the machine is asked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from agentrl.learner.sharding import read_local

FEWEST, MOST = 256, 8192  # tokens of a micro-batch that are ever chosen, in powers of two
SHARE = 8  # of all memory, one part in so many for activations: a laptop has other things to do
FREE_SHARE = 2  # and at most one part in so many of what is free


def measure_kept_bytes(model: nn.Module, run: Callable[[], object]) -> int:
    """Run a forward pass, and count the bytes that autograd keeps of it, beside the model's own tensors.

    Weights that are gathered from shards for the pass, and let go of, are the model's own too.
    """
    kept: dict[int, torch.UntypedStorage] = {}

    def count(tensor: Tensor) -> Tensor:
        with suppress(NotImplementedError):  # a tensor without storage of its own
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        result = run()  # alive until all is counted
    own = {read_local(t).untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    size = sum(storage.nbytes() for storage in kept.values() if storage.data_ptr() not in own)
    del result
    return size


def count_affordable_tokens(bytes_per_token: float, total: int, free: int, processes: int = 1) -> int:
    """Count the tokens whose activations a machine has room for: a power of two, from FEWEST to MOST.

    Args:
        total, free: bytes of the machine's memory.
        processes: that share it.
    """
    room = min(total // SHARE, free // FREE_SHARE) / processes
    affordable = max(int(room / max(bytes_per_token, 1.0)), 1)
    return min(max(1 << (affordable.bit_length() - 1), FEWEST), MOST)


def read_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a device's memory, and how many of them are free."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
    free = total // 2  # where the system does not say
    if sys.platform.startswith("linux"):
        free = _read_numbers(Path("/proc/meminfo")).get("MemAvailable:", free >> 10) << 10
    limit, used = _read_container_limit()
    return (total, free) if limit is None else (min(total, limit), min(free, max(limit - used, 0)))


def _read_container_limit(root: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int]:
    """Return the bytes that the container of this process may have, None for any, and those it uses beside files."""
    for folder, limit, used, files in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):
            most = int((folder / limit).read_text())  # "max": no number
            cached = _read_numbers(folder / "memory.stat").get(files, 0)
            return most, int((folder / used).read_text()) - cached
    return None, 0


def _read_numbers(file: Path) -> dict[str, int]:
    """Read lines of a name and a number."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def estimate_owed_bytes(optimizers: Sequence[torch.optim.Optimizer], trained: Sequence[Tensor]) -> int:
    """Estimate the bytes that training will still ask for: gradients, and two running means of each weight."""
    moments = 0 if any(optimizer.state for optimizer in optimizers) else 8
    return sum(p.numel() * (p.itemsize + moments) for p in trained)
