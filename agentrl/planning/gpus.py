"""Kinds of GPUs, by name: their memory, their speed, and what connects them.

A package adds kinds under the entry-point group ``agentrl.gpus``; ``module:attribute`` names one too: a `Gpu`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentrl.errors import ContractError, UserError, suggest
from agentrl.settings.registry import list_registered, load_registered


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, by its maker's figures.

    Args:
        memory_gib: of each.
        tflops: dense products in bfloat16.
        bandwidth_gb_s: of its own memory.
        link_gb_s: between those of one machine, in each direction.
        network_gb_s: of each one's share of the network between machines.
        a_machine: how many a machine has.
    """

    memory_gib: float
    tflops: float
    bandwidth_gb_s: float
    link_gb_s: float = 32.0
    network_gb_s: float = 12.5
    a_machine: int = 8


GPUS = {
    "h100": Gpu(80, 989, 3350, 450, 50),
    "h200": Gpu(141, 989, 4800, 450, 50),
    "b200": Gpu(180, 2250, 8000, 900, 50),
    "a100": Gpu(80, 312, 2039, 300, 25),
    "a100-40gb": Gpu(40, 312, 1555, 300, 25),
    "l40s": Gpu(48, 362, 864),
    "l4": Gpu(24, 121, 300),
    "a10g": Gpu(24, 70, 600),
    "rtx4090": Gpu(24, 165, 1008, a_machine=2),
    "rtx3090": Gpu(24, 71, 936, a_machine=2),
    "mi300x": Gpu(192, 1307, 5300, 448, 50),
}


@dataclass(frozen=True)
class Cluster:
    """So many GPUs of one kind."""

    count: int
    name: str
    gpu: Gpu

    def __str__(self) -> str:
        return f"{self.count} x {self.name}"


def parse_cluster(text: str) -> Cluster:
    """Read ``8xh100``; ``h100`` is one.

    Raises:
        UserError: it is nothing of the kind, or no such GPU is known.
    """
    parts = re.fullmatch(r"(?:(\d+)\s*x\s*)?(\S+)", text.strip())
    if parts is None or (parts[1] is not None and int(parts[1]) < 1):
        raise UserError(f"--gpus is such as 8xh100, not {text!r}")
    return Cluster(int(parts[1] or 1), parts[2], find_gpu(parts[2]))


def find_gpu(name: str) -> Gpu:
    """Find a kind of GPU.

    Raises:
        UserError: there is no such kind.
    """
    known = GPUS.get(name.lower())
    if known is not None:
        return known
    names = [*GPUS, *list_registered("gpu")]
    if ":" not in name and name not in names:
        raise UserError(
            f"no GPU {name!r}{suggest(name.lower(), names)}; or module:attribute, an agentrl.planning.gpus.Gpu "
            "with its figures"
        )
    gpu = load_registered("gpu", name)
    if not isinstance(gpu, Gpu):
        raise ContractError(f"gpu {name!r} is an agentrl.planning.gpus.Gpu, not {gpu!r:.80}")
    return gpu
