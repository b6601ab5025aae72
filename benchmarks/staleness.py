"""What running ahead buys, and what it costs: python benchmarks/staleness.py

Trainings of nano on math-tools whose calculator takes 200 ms, alike but for ``rollout.max_staleness``: with 0 the
learner waits for the rollouts and they for it; with 1 and more they overlap.

  step s     mean wall of a step
  learn s    of it the learner's own; what of it the rollouts did not wait for is hidden
  bound s    the greater one of the learner's seconds and, for the rollouts, a step's with 0 less the learner's: what
             a step would take if they overlapped wholly and did not share two cores
  staleness  the mean, and the most, of what was trained
  reward     on held-out tasks after the training, sampled and greedy
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rollout import SlowMath

from agentrl import train


def trained(staleness: int, steps: int, seed: int) -> tuple[dict[str, Any], list[dict[str, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        summary = train(
            SlowMath,
            env_args={"mean_s": 0.2},
            steps=steps,
            seed=seed,
            rollout={"max_staleness": staleness},
            eval={"every": 0, "final_tasks": 256},
            run={"dir": f"{folder}/run"},
        ).summary
        lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
        return summary, [line for line in lines if "step_time" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    table = Table("max_staleness", "step s", "learn s", "bound s", "step / bound", "staleness", "reward", "x faster")
    first = rolled = 0.0
    for k in args.staleness:
        summary, rows = trained(k, args.steps, args.seed)
        rows = rows[2:]
        step, learn = (fmean(row[name] for row in rows) for name in ("step_time", "time/learn"))
        if not first:
            first, rolled = step, step - learn
        bound = max(learn, rolled) if k else step
        ages = fmean(row.get("staleness/mean", 0.0) for row in rows), max(row.get("staleness/max", 0) for row in rows)
        table.add_row(
            str(k),
            f"{step:.2f}",
            f"{learn:.2f}",
            f"{bound:.2f}",
            f"{step / bound:.2f}",
            f"{ages[0]:.2f}, {ages[1]:.0f}",
            f"{summary['reward_after']:.3f} / {summary['greedy_after']:.3f}",
            f"{first / step:.2f}",
        )
    Console(width=None if Console().is_terminal else 110).print(table)


if __name__ == "__main__":
    main()
