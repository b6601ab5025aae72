"""Is an evaluation charged to itself? python benchmarks/evaluations.py

Trainings of nano on the shop whose tools take 300 ms, with an evaluation after every step and with none. Training
does the same work in both: what its seconds differ by is what evaluations leave in them, or take from them.

  train s    `train_seconds` of the summary
  CPU s      `cpu_seconds` of the summary
  eval s     the seconds of the evaluations in mid-run
  episode s  the median training episode of the steps after the first

Pairs run one after the other, and ratios are of their medians. Seconds need a quiet machine, CPU-seconds hardly.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from agentrl import train


class Cost(NamedTuple):
    train_s: float
    cpu_s: float
    eval_s: float
    episode_s: float


def measure(every: int, steps: int, mode: str, staleness: int) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        summary = train(
            "shop",
            env_args={"latency_s": 0.3},
            steps=steps,
            eval={"every": every, "mode": mode, "tasks": 24, "final_tasks": 8},
            rollout={"max_staleness": staleness},
            run={"dir": str(run)},
        ).summary
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        own = [row["eval/runtime"] for row in rows if "eval/runtime" in row and 0 < row["step"] < steps]
        files = sorted(run.glob("trajectories/train-*.parquet"))[1:]
        episodes = [t for file in files for t in pq.read_table(file, columns=["timings"])["timings"].to_pylist()]
        seconds = [part["value"] for timings in episodes for part in timings if part["name"] == "total"]
        return Cost(summary["train_seconds"], summary["cpu_seconds"], sum(own), median(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mode", choices=["pause", "overlap"], default="pause")
    parser.add_argument("--staleness", type=int, default=0)
    args = parser.parse_args()
    pairs = [[measure(every, args.steps, args.mode, args.staleness) for every in (0, 1)] for _ in range(args.repeats)]
    table = Table("eval.every", "train s", "CPU s", "eval s", "episode s", title=f"{args.steps} steps, {args.mode}")
    without, with_evaluations = (
        Cost(*(median(values) for values in zip(*costs, strict=True))) for costs in zip(*pairs, strict=True)
    )
    for every, cost in enumerate((without, with_evaluations)):
        table.add_row(str(every), *(f"{value:.2f}" for value in cost))
    Console().print(table)
    for name in ("train_s", "cpu_s"):
        ratio = getattr(with_evaluations, name) / getattr(without, name)
        Console().print(f"{name} with evaluations / without: {ratio:.3f}", highlight=False)


if __name__ == "__main__":
    main()
