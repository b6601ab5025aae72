"""search-qa in whole contexts, and in folded ones of a quarter of nano's: python benchmarks/folded_contexts.py

`agentrl sft` learns it from the environment's expert, first in whole contexts, and goes on from there in folded ones,
as a user types both. The names of the held-out questions are in no demonstration. For each run:

  reward     of 256 held-out tasks, sampled at temperature 1, with its 95 % interval; greedy beside it
  contexts   tokens of the longest one before its last turn, over the sampled episodes; contexts an episode
  CPU-s, s   of the command: playing the expert, training, both evaluations

and the quotient of the two rewards.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from warm_starts import Cost, run_command

from agentrl import Run, Trajectory

BUDGET = 256
COMMON = "--env search-qa --env.size 20 --sft.batch_size 32 --learner.lr_scheduler linear --eval.every 0"
WHOLE = f"{COMMON} --steps 500 --learner.lr 4e-3 --learner.warmup_ratio 0.05"
FOLDED = (
    f"{COMMON} --steps 600 --learner.lr 3e-3 --learner.warmup_ratio 0.05 "
    f"--rollout.context fold --rollout.context_budget {BUDGET} --rollout.summary_tokens 64"
)


def learn(words: str, model: str, out: Path) -> Cost:
    """Run ``agentrl sft``, unless the folder holds its end."""
    shown = f"agentrl sft {words} --model {Path(model).name} --run.dir {out.name}"
    print(shown, flush=True)
    if (out / "summary.json").exists():
        return Cost(float("nan"), float("nan"))
    return run_command(["sft", *words.split(), "--model", model, "--run.dir", str(out)])


def describe(folder: Path, cost: Cost) -> float:
    """Print what a run came to; return its held-out reward, sampled."""
    after: dict[str, Any] = json.loads((folder / "summary.json").read_text())["after"]
    for kind in ("sampled", "greedy"):
        reward = after[kind]
        print(f"  {kind:<8} {reward['reward']:.3f} ({reward['low']:.3f} to {reward['high']:.3f})")
    last = max(int(path.stem.removeprefix("test-")) for path in (folder / "trajectories").glob("test-*.parquet"))
    episodes = list(Run(folder).episodes(f"split=test step={last}"))
    longest = max(count_before_last_turn(t) for t in episodes)
    contexts = mean(len(t.contexts) for t in episodes)
    print(f"  contexts of up to {longest:,} tokens; {contexts:.2f} an episode")
    print(f"  {cost.cpu_s:.0f} CPU-s, {cost.wall_s:.0f} s\n", flush=True)
    return float(after["sampled"]["reward"])


def count_before_last_turn(episode: Trajectory) -> int:
    """Count the tokens of an episode's longest context, as far as its last turn was sampled in it."""
    return max(sum(len(s.token_ids) for s in context[:-1]) for context in episode.contexts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="a folder that keeps the runs; what it has is not run again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        whole = describe(folder / "whole", learn(WHOLE, "nano", folder / "whole"))
        folded = describe(folder / "folded", learn(FOLDED, str(folder / "whole"), folder / "folded"))
    print(f"folded in {BUDGET} tokens: {folded / whole:.3f} of the reward in whole contexts")


if __name__ == "__main__":
    main()
