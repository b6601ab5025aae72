"""Count how often the 95 % interval of a mean reward holds the true mean, by kind of rewards and number of tasks.

python benchmarks/intervals.py [--evaluations 2000]: half a minute; the table of docs/evaluation.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import exp
from typing import Any

import numpy as np

from agentrl.evaluation.statistics import estimate_mean

TRIALS = 4
TASKS = (20, 50, 200)
Draw = Callable[[np.random.Generator, int], Any]  # rewards, tasks x TRIALS


def draw_uniform(rng: np.random.Generator, tasks: int) -> Any:
    return 1.0 * (rng.random((tasks, TRIALS)) < rng.random((tasks, 1)))


def draw_hard(rng: np.random.Generator, tasks: int) -> Any:
    return 1.0 * (rng.random((tasks, TRIALS)) < rng.beta(0.1, 0.9, (tasks, 1)))


def draw_long_tail(rng: np.random.Generator, tasks: int) -> Any:
    return np.exp(1.5 * rng.standard_normal((tasks, TRIALS)))


def draw_lumps(rng: np.random.Generator, tasks: int) -> Any:
    return np.repeat(10.0 * (rng.random((tasks, 1)) < 0.1), TRIALS, axis=1)


def draw_jackpots(rng: np.random.Generator, tasks: int) -> Any:
    return 100.0 * (rng.random((tasks, 1)) < 0.05) + rng.random((tasks, TRIALS))


KINDS: dict[str, tuple[Draw, float]] = {  # and the true mean
    "right or wrong, each task its own chance": (draw_uniform, 0.5),
    "right or wrong, most tasks nearly always wrong (mean 0.1)": (draw_hard, 0.1),
    "log-normal, a long tail": (draw_long_tail, exp(1.5**2 / 2)),
    "10 in a tenth of the tasks, else 0": (draw_lumps, 1.0),
    "100 in a twentieth of the tasks, else 0 to 1": (draw_jackpots, 5.5),
}


def measure_coverage(draw: Draw, mean: float, tasks: int, evaluations: int) -> float:
    """Return the share of simulated evaluations whose interval holds the true mean."""
    rng = np.random.default_rng(0)
    found = (estimate_mean(draw(rng, tasks).tolist()) for _ in range(evaluations))
    return sum(e.low <= mean <= e.high for e in found) / evaluations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluations", type=int, default=2000)
    evaluations = parser.parse_args().evaluations
    for name, (draw, mean) in KINDS.items():
        shares = (f"{measure_coverage(draw, mean, tasks, evaluations):.0%} of {tasks} tasks" for tasks in TASKS)
        print(f"{name}: {', '.join(shares)}")


if __name__ == "__main__":
    main()
