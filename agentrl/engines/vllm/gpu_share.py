"""The share of a GPU that vLLM takes where the learner is on the same one, and what stays there of the learner.

vLLM samples    vLLM's share                        | weights, and the optimizer unless it is on the CPU
learner learns  what vLLM leaves asleep (a context) | the same, gradients, activations, logits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from agentrl.errors import UserError

if TYPE_CHECKING:
    from agentrl.settings.schema import TrainConfig

MOST = 0.9  # of a GPU: what vLLM takes by itself
APART = 0.06  # of a GPU, for two contexts, and what allocators cannot fill
LEAST_CACHE = 0.05  # of a GPU, for keys and values: with less it is hardly an engine
STATE_BYTES = {"adamw_8bit": 2, "muon": 4}  # an optimizer's running means, of a trained parameter; AdamW's are two
GIB = 1 << 30


@dataclass(frozen=True)
class GpuShare:
    """The division of a GPU while vLLM samples; bytes."""

    share: float
    total: int
    kept: int  # by the learner
    chosen: bool  # by this module, not by the user

    def __str__(self) -> str:
        """Return the sentence of the run's log."""
        by = "engine.gpu_share sets another share" if self.chosen else "by engine.gpu_share"
        return (
            f"vLLM takes {self.share:.2f} of the GPU's memory, {self.share * self.total / GIB:.0f} of "
            f"{self.total / GIB:.0f} GiB, while the learner keeps {self.kept / GIB:.1f} GiB there; {by}"
        )


def divide_gpu(config: TrainConfig, model: nn.Module, gpu_share: float | None) -> GpuShare | None:
    """Divide the policy's GPU between vLLM and the learner; None on the CPU.

    Raises:
        UserError: there is no GPU to share, or too little of it stays for vLLM.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        if gpu_share is not None:
            raise UserError(f"engine.gpu_share {gpu_share:g} is of a GPU, and the policy is on the {device.type}")
        return None
    total = int(torch.cuda.get_device_properties(device).total_memory)
    return choose_gpu_share(config, model, total, gpu_share)


def choose_gpu_share(config: TrainConfig, model: nn.Module, total: int, gpu_share: float | None) -> GpuShare:
    """Choose vLLM's share of ``total`` bytes; ``gpu_share`` where it is given.

    Raises:
        UserError: vLLM has no room for the weights and a few rows.
    """
    kept = count_kept_bytes(config, model)
    weights = sum(p.nbytes for p in model.parameters())
    room = total - kept
    if config.rollout.max_staleness:  # vLLM does not sleep: half of what is left is the learner's, to learn in
        room //= 2
    share = min(room / total - APART, MOST) if gpu_share is None else gpu_share
    least = weights / total + LEAST_CACHE
    if share < least:
        ways = ["--lora.rank 16 trains an adapter", "--engine server samples on another GPU"]
        if not config.learner.optimizer_offload and not config.rollout.max_staleness:
            ways.insert(0, "--learner.optimizer_offload true keeps the optimizer on the CPU meanwhile")
        raise UserError(
            f"engine vllm: {max(share, 0.0):.2f} of the GPU's {total / GIB:.0f} GiB is too little for vLLM: the "
            f"weights and a few rows need {least:.2f}, and the learner keeps {kept / GIB:.1f} GiB. "
            f"{'; '.join(ways)}"
        )
    return GpuShare(round(share, 3), total, kept, gpu_share is None)


def count_kept_bytes(config: TrainConfig, model: nn.Module) -> int:
    """Count the bytes of a GPU that the learner keeps while vLLM samples: weights, reference, optimizer."""
    c = config.learner
    trained = [p for p in model.parameters() if p.requires_grad]
    kept = sum(p.nbytes for p in model.parameters()) + (sum(p.nbytes for p in trained) if c.beta else 0)
    if not c.optimizer_offload:
        moments = STATE_BYTES.get(c.optimizer, 8)
        kept += sum(p.numel() * (moments + (4 if p.itemsize < 4 else 0)) for p in trained)
    if config.rollout.max_staleness:
        kept += sum(p.numel() * (p.itemsize + (4 if p.itemsize < 4 else 0)) for p in trained)  # gradients
    return kept
