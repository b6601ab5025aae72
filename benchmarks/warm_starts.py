"""A warm start, then reinforcement learning, by nano and offline: python benchmarks/warm_starts.py ENV ...

For each environment `agentrl sft` learns from its expert, and `agentrl train` goes on from there, as a user types both:

  before, after   mean reward of 256 held-out tasks, sampled at temperature 1, with its 95 % interval; greedy beside it
  change          of the two, paired by task, with its 95 % interval
  CPU-s, wall     of the whole command: loading, playing the expert, training, both evaluations, tools and sandboxes

Before, nano earns nothing in them. A setting that makes one easier than it is by default stands in the command:
`game` has 16 numbers and 5 turns here, by default 1,000 and 10; `sql-qa` one kind of database, and its tables are told.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SFT = "--learner.lr_scheduler linear --learner.warmup_ratio 0.05 --eval.every 0"
TRAIN = "--learner.lr_scheduler linear --eval.every 0"
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


class Recipe(NamedTuple):
    """The settings of an environment, and those of the two commands."""

    env: str
    sft: str
    train: str


RECIPES: Mapping[str, Recipe] = {
    "code": Recipe(
        "--env code --rollout.max_tokens 256",
        "--steps 215 --learner.lr 4e-3",
        "--steps 40 --learner.lr 1e-3",
    ),
    "game": Recipe(
        "--env game --env.numbers 16",
        "--steps 230 --learner.lr 4e-3",
        "--steps 90 --learner.lr 1e-3",
    ),
    "sql-qa": Recipe(
        "--env sql-qa --env.families shop --env.show_schema true --rollout.max_tokens 256",
        "--steps 300 --learner.lr 4e-3",
        "--steps 40 --learner.lr 1e-3",
    ),
}


class Cost(NamedTuple):
    cpu_s: float
    wall_s: float


def run_command(words: Sequence[str]) -> Cost:
    """Run agentrl; return what it cost, its children included. What it prints goes to a file that a failure shows."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        command, environment = [sys.executable, "-m", "agentrl", *words], {**os.environ, **QUIET}
        done = subprocess.run(command, env=environment, stdout=said, stderr=said, check=False)
        if done.returncode:
            said.seek(0)
            raise SystemExit(said.read()[-4000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(cpu_s, time.monotonic() - started)


def describe(summary: Mapping[str, Any], cost: Cost) -> str:
    """Describe a run: rewards before and after, the change between them, and the cost."""
    lines = []
    for kind in ("sampled", "greedy"):
        before, after, change = (summary[part][kind] for part in ("before", "after", "difference"))
        lines.append(
            f"  {kind:<8} {_format('reward', before)} -> {_format('reward', after)}   change {_format('mean', change)}"
        )
    return "\n".join([*lines, f"  {cost.cpu_s:.0f} CPU-s, {cost.wall_s:.0f} s"])


def _format(name: str, of: Mapping[str, float]) -> str:
    return f"{of[name]:.3f} ({of['low']:.3f} to {of['high']:.3f})"


def warm_start(name: str, folder: Path) -> None:
    """Run both commands of an environment, and print what they came to."""
    recipe, total = RECIPES[name], Cost(0, 0)
    for verb, words, model in (("sft", f"{SFT} {recipe.sft}", "nano"), ("train", f"{TRAIN} {recipe.train}", "sft")):
        out = folder / f"{name}-{verb}"
        start = str(folder / f"{name}-sft") if model == "sft" else model
        shown = f"agentrl {verb} {recipe.env} {words} --model {start if model == 'nano' else f'{name}-sft'}"
        print(f"{shown} --run.dir {out.name}", flush=True)
        cost = run_command([verb, *recipe.env.split(), *words.split(), "--model", start, "--run.dir", str(out)])
        total = Cost(total.cpu_s + cost.cpu_s, total.wall_s + cost.wall_s)
        print(describe(json.loads((out / "summary.json").read_text()), cost), flush=True)
    print(f"{name}: {total.cpu_s:.0f} CPU-s, {total.wall_s:.0f} s in all\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("envs", nargs="*", metavar="ENV", help=f"of {', '.join(RECIPES)}; all by default")
    parser.add_argument("--keep", type=Path, help="a folder in which the runs are kept")
    options = parser.parse_args()
    if unknown := [e for e in options.envs if e not in RECIPES]:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(RECIPES)}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.envs or RECIPES:
            warm_start(name, folder)


if __name__ == "__main__":
    main()
