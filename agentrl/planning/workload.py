"""The work of a step, and what a run that was made says of it and of the machine's speed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl.errors import UserError
from agentrl.planning.shapes import Shape
from agentrl.settings.learner import LearnerConfig

HEADROOM = 1  # steps at the beginning that say little: kernels are compiled, memory is found


@dataclass(frozen=True)
class Workload:
    """The episodes of a step.

    Args:
        context: tokens of an episode when it ends; ``sampled``: those of them that the engine samples.
    """

    episodes: int
    context: int
    sampled: int

    def learn_flops(self, shape: Shape, *, checkpointing: bool, passes: float = 1.0) -> float:
        """Count the operations of learning from all tokens, nothing shared; ``passes``: forward ones are a third."""
        forwards = 8 if checkpointing else 6
        attention = 2 * forwards * shape.attention * self.context / 2
        return self.episodes * self.context * (forwards * shape.active + attention) * passes


def count_passes(learner: LearnerConfig) -> float:
    """Count the passes of a step over its tokens, forward and backward; that of the KL term's reference is a third."""
    return learner.num_iterations + (1 / 3 if learner.beta else 0.0)


@dataclass(frozen=True)
class Speed:
    """Parts of a GPU's figures that are reached.

    Args:
        learn: of its products, learning; ``learn_experts``: where a token goes through a part of the model.
        read: of its memory's bandwidth, sampling.
        measured: by a run; otherwise usual ones.
    """

    learn: float = 0.4
    learn_experts: float = 0.3
    read: float = 0.6
    measured: str = ""

    def of_learning(self, shape: Shape) -> float:
        """Return the part of the products for such a model."""
        return self.learn_experts if shape.has_experts else self.learn


@dataclass(frozen=True)
class Measured:
    """A run's steps by its metrics, in seconds and tokens."""

    folder: Path
    learn_s: float
    generate_s: float
    tokens: float
    sampled: float
    episodes: int

    def workload(self) -> Workload:
        """Return the run's own work."""
        return Workload(self.episodes, round(self.tokens / self.episodes), max(round(self.sampled / self.episodes), 1))


def read_measured(folder: Path, episodes: int) -> Measured:
    """Read the means of a run's steps, the first one left out.

    Args:
        episodes: of a step.

    Raises:
        UserError: it has none that were finished.
    """
    steps: list[Mapping[str, Any]] = []
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--calibrate {folder}: no metrics can be read there ({error.strerror})") from None
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a run that goes on
            continue
        if {"time/learn", "time/generate", "num_tokens", "sampled_tokens"} <= row.keys():
            steps.append(row)
    steps = [row for row in steps[HEADROOM:] if row["time/learn"] > 0 and row["time/generate"] > 0]
    if not steps:
        raise UserError(
            f"--calibrate {folder}: it has no two finished steps of sampling and learning, and the first says little"
        )

    def mean(name: str) -> float:
        return fmean(float(row[name]) for row in steps)

    return Measured(
        folder, mean("time/learn"), mean("time/generate"), mean("num_tokens"), mean("sampled_tokens"), episodes
    )


def calibrate(
    measured: Measured, shape: Shape, *, tflops: float, bandwidth: float, itemsize: int, gpus: int, rows: int,
    checkpointing: bool, passes: float,
) -> Speed:  # fmt: skip
    """Work out which parts of a GPU's figures a run reached.

    Args:
        tflops, bandwidth: of a GPU of the kind that the run was made on, in its own units.
        itemsize: of the weights.
        gpus: that learned, and as many that sampled.
        rows: sampled at the same time at most, of each.
        passes: of the run's steps, as `count_passes` counts them.
    """
    work = measured.workload()
    flops = work.learn_flops(shape, checkpointing=checkpointing, passes=passes)
    learn = flops / measured.learn_s / (gpus * tflops * 1e12)
    at_once = min(rows, -(-work.episodes // gpus))
    bytes_a_pass = shape.parameters * itemsize + at_once * shape.cache_values * itemsize * work.context / 2
    passes_a_second = measured.sampled / gpus / measured.generate_s / at_once
    read = bytes_a_pass * passes_a_second / (bandwidth * 1e9)
    says = f"measured in {measured.folder}: {learn:.2g} of the products, {read:.2g} of the bandwidth"
    return replace(Speed(), learn=learn, learn_experts=learn, read=read, measured=says)
