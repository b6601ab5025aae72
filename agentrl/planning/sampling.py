"""Replicas of vLLM over some GPUs: rows that fit, and tokens a second."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from agentrl.planning.gpus import Gpu
from agentrl.planning.shapes import Shape
from agentrl.planning.workload import Speed, Workload

VLLM_SHARE = 0.9  # of a GPU that it has to itself
SIZES = (1, 2, 4, 8, 16)  # of a replica, in GPUs
DOUBLED = 0.9  # of twice the speed is left where a replica has twice as many GPUs: they wait for each other
FEWEST_ROWS = 4  # with less it is hardly an engine


@dataclass(frozen=True)
class Sampling:
    """Replicas that are alike.

    Args:
        size: GPUs of a replica: vLLM's tensor parallelism.
        rows: at the same time, of a replica; ``limited``: by engine.max_num_seqs, and not by memory.
        rate: tokens a second of a replica.
        used: bytes of each GPU.
    """

    replicas: int
    size: int
    rows: int
    rate: float
    used: float
    limited: bool

    @property
    def gpus(self) -> int:
        """Return how many GPUs sample."""
        return self.replicas * self.size

    def seconds(self, work: Workload) -> float:
        """Return how long they sample the tokens of a step."""
        return work.episodes * work.sampled / (self.replicas * self.rate)


def plan_sampling(
    gpus: int, gpu: Gpu, shape: Shape, work: Workload, speed: Speed, *, itemsize: int, most_rows: int, room: float
) -> Sampling | None:
    """Choose replicas that sample the most on so many GPUs; None where no size of theirs holds the model.

    Args:
        most_rows: engine.max_num_seqs.
        room: bytes of each GPU that vLLM may take.
    """
    made = (
        _plan_size(size, gpus // size, gpu, shape, work, speed, itemsize, most_rows, room)
        for size in SIZES
        if size <= gpus
    )
    return max((m for m in made if m is not None), key=lambda m: m.replicas * m.rate, default=None)


def _plan_size(
    size: int,
    replicas: int,
    gpu: Gpu,
    shape: Shape,
    work: Workload,
    speed: Speed,
    itemsize: int,
    most: int,
    room: float,
) -> Sampling | None:
    weights = shape.parameters * itemsize
    a_row = shape.cache_values * itemsize * work.context
    fit = int((size * room - weights) / a_row) if size * room > weights else 0
    wanted = min(most, -(-work.episodes // replicas))
    rows = min(2 * fit, wanted)  # half of a row's keys and values are there on average
    if fit < min(FEWEST_ROWS, wanted):
        return None
    read = weights + rows * a_row / 2
    bandwidth = size * DOUBLED ** log2(size) * gpu.bandwidth_gb_s * 1e9 * speed.read
    return Sampling(replicas, size, rows, rows * bandwidth / read, read / size, rows == most < 2 * fit)
