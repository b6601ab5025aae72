"""The memory of a learner's GPU, alone or as one of many that hold shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.planning.shapes import Shape

GIB = 1 << 30
MASTER, GRADIENT = 4, 4  # bytes of a trained parameter in shards: single precision, whatever is computed in
MOMENTS = {"adamw_8bit": 2, "muon": 4}  # an optimizer's running means, of a trained parameter; AdamW's are two
QUANTIZED = 0.56  # bytes of a weight in 4 bits, with the scales of its blocks
APART = 0.06  # of a GPU: contexts, communication, and what an allocator cannot fill


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes of one of the learner's GPUs, by what they are for.

    Args:
        kept: between updates; ``away``: of these, what the CPU has while the engine samples.
        learning: beside them, in an update.
        host: of the machine's own memory, for one GPU: shards that are kept and stepped there.
    """

    kept: Mapping[str, float]
    learning: Mapping[str, float]
    away: float = 0.0
    host: float = 0.0

    @property
    def sampling(self) -> float:
        """Return what the GPU holds while the engine samples."""
        return sum(self.kept.values()) - self.away

    @property
    def peak(self) -> float:
        """Return the most that an update takes."""
        return sum(self.kept.values()) + sum(self.learning.values())


@dataclass(frozen=True)
class Training:
    """A training of a model: the parameters that are trained, and how.

    Args:
        trained, frozen: parameters.
        itemsize: bytes of a weight as it is computed with.
        passing: bytes of a micro-batch's activations and logits, as the learner's own update makes them.
    """

    trained: int
    frozen: int
    itemsize: int
    optimizer: str
    passing: float
    has_reference: bool = False
    offloads: bool = False
    offloads_shards: bool = False
    quantized: bool = False

    @property
    def frozen_itemsize(self) -> float:
        """Return the bytes of a weight that is not trained."""
        return QUANTIZED if self.quantized else self.itemsize

    @property
    def moments(self) -> int:
        """Return the bytes of the optimizer's running means, of a trained parameter."""
        return MOMENTS.get(self.optimizer, 8)


def count_alone(t: Training) -> LearnerMemory:
    """Count the memory of a learner that holds everything."""
    master = MASTER if t.itemsize < MASTER else 0
    optimizer = t.trained * (master + t.moments)
    kept = {"weights": t.trained * t.itemsize + t.frozen * t.frozen_itemsize, "optimizer": optimizer}
    if t.has_reference:
        kept["reference"] = t.trained * t.itemsize
    gradients = t.trained * t.itemsize
    step = t.trained * master  # the gradients of the single-precision weights, when all activations are gone
    learning = {"gradients": gradients, "activations and logits, or the step": max(t.passing, step)}
    return LearnerMemory(kept, learning, optimizer if t.offloads else 0.0)


def count_sharded(t: Training, shape: Shape, shards: int) -> LearnerMemory:
    """Count the memory of one of ``shards`` GPUs: a layer is gathered, the next one, and what is in no layer."""
    optimizer = t.trained * t.moments / shards
    weights = t.trained * MASTER + t.frozen * t.frozen_itemsize
    kept: dict[str, float] = {"weights": weights / shards, "optimizer": optimizer}
    if t.has_reference:
        kept["reference"] = t.trained * MASTER / shards
    share = t.trained / (t.trained + t.frozen)
    layer = 2 * shape.layer * (share * t.itemsize + (1 - share) * t.frozen_itemsize)
    gathered = layer + shape.root * t.itemsize
    reduced = share * (max(shape.layer, shape.root) * GRADIENT + shape.layer * t.itemsize)
    away = optimizer if t.offloads else 0.0
    gradients = t.trained * GRADIENT / shards
    host = 0.0
    if t.offloads_shards:  # and the gradients, once they are reduced
        host, kept, away, gradients = sum(kept.values()) + gradients, {}, 0.0, 0.0
    learning = {
        "gradients": gradients,
        "gathered": gathered,
        "reduced": reduced,
        "activations and logits": t.passing,
    }
    return LearnerMemory(kept, learning, away, host)
