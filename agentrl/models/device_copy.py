"""Copies from the host to a device that nobody waits for."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device; itself where the device is the host.

    A copy from ordinary memory would let a GPU finish all that is queued first.
    """
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)
