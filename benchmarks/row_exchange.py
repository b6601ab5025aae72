"""Rows on their way to two learner processes: python benchmarks/row_exchange.py [--tree DIR]

Rank 0 is given rows of 8,192 tokens, in groups of 8 that share a prompt of 2,048; three quarters of the rest are
trained. Both ranks run up to the first forward pass: each has its micro-batches of 16,384 tokens, with their forests
and columns. Nothing is computed, so the policy is a tiny one.

  sent     to the other rank
  ready    seconds from rank 0's call to each rank's having its micro-batches
  peak     memory of each rank at most, beside what it had before the call; kept: when it is ready

--tree names another checkout of the repository, which is measured in turn with this one. Medians of three runs.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

HERE = Path(__file__).parents[1]
ROW, PROMPT, GROUP, RUNS = 8192, 2048, 8, 3


class Ready(Exception):
    """The micro-batches are there."""


def make_rows(tokens: int) -> list[Any]:
    """Make the rows; they have no token's number in common, as those of episodes have not."""
    import numpy as np

    from agentrl.types import Sample

    rng, rows = np.random.default_rng(0), []
    for number in range(tokens // ROW):
        if number % GROUP == 0:
            prompt = rng.integers(1, 150_000, PROMPT)
        own = rng.integers(1, 150_000, ROW - PROMPT)
        mask = [0] * PROMPT + [1, 1, 1, 0] * ((ROW - PROMPT) // 4)
        logprobs = (-rng.random(ROW)).tolist()
        rows.append(Sample([*prompt.tolist(), *own.tolist()], mask, logprobs, [float(number % 3 + 1)] * ROW))
    return rows


def read_memory(what: str) -> int:
    """Return VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def learn(tokens: int, out: str) -> None:
    """Be one of the two ranks."""
    from torch import distributed
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from agentrl.learner.distributed import init_process_group
    from agentrl.learner.hidden_states import PREFIX
    from agentrl.learner.learner import Learner, LossSettings
    from agentrl.learner.optimizers import make_optimizers

    group, sent = init_process_group(), 0
    broadcast, send, prepare = distributed.broadcast_object_list, distributed.send, Learner._prepare

    def count_broadcast(messages: list[Any], src: int) -> None:
        nonlocal sent
        sent += 0 if group.is_worker else len(pickle.dumps(messages))
        broadcast(messages, src=src)

    def count_send(tensor: Any, rank: int) -> None:
        nonlocal sent
        sent += tensor.nbytes
        send(tensor, rank)

    def prepare_all(self: Any, *given: Any) -> None:
        for batch, _ in prepare(self, *given).shard:
            for name in ("forest", "trained", "targets", "logprobs", "advantages", "weights", "row_index"):
                getattr(batch, name)
        raise Ready

    distributed.broadcast_object_list, distributed.send = count_broadcast, count_send  # type: ignore[assignment]
    Learner._prepare = prepare_all  # type: ignore[method-assign, assignment]
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    policy = Qwen3ForCausalLM(Qwen3Config(vocab_size=150_000, num_key_value_heads=2, head_dim=16, **shape)).eval()
    settings = LossSettings(threads=1, max_tokens_per_microbatch=2 * ROW)
    learner = Learner(policy, lambda p: make_optimizers(p, "adamw", 1e-6), settings, group, "full")
    learner.packing.chosen = PREFIX  # its proof is not what is measured
    rows = [] if group.is_worker else make_rows(tokens)
    group.all_gather(None)  # both have begun
    Path("/proc/self/clear_refs").write_text("5")  # the most memory is counted from here on
    before, begun = read_memory("VmRSS"), monotonic()
    try:
        learner.run_worker() if group.is_worker else learner.update(rows)
    except Ready:
        mine = {"ready": monotonic(), "sent": sent, "kept": read_memory("VmRSS") - before}
        mine |= {"peak": read_memory("VmHWM") - before, "begun": begun}
    every = group.all_gather(mine)
    if not group.is_worker:
        Path(out).write_text(json.dumps(every))
    group.destroy()


def measure(tree: Path, tokens: int) -> dict[str, float]:
    """Run both ranks from a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out.json"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, *launch, "--tokens", str(tokens), "--out", out]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        first, second = json.loads(Path(out).read_text())
    figures = {"sent MiB": (first["sent"]) / 2**20}
    for rank, own in enumerate((first, second)):
        figures[f"ready {rank} s"] = own["ready"] - first["begun"]
        figures[f"peak {rank} MiB"], figures[f"kept {rank} MiB"] = own["peak"] / 2**20, own["kept"] / 2**20
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**21, 2**22])
    parser.add_argument("--tree", type=Path, help="another checkout")
    parser.add_argument("--out", help=argparse.SUPPRESS)  # of a rank
    args = parser.parse_args()
    if args.out:
        learn(args.tokens[0], args.out)
        return
    trees = {"here": HERE} | ({"there": args.tree.resolve()} if args.tree else {})
    for tokens in args.tokens:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(RUNS):
            for name, tree in trees.items():
                runs[name].append(measure(tree, tokens))
        for name, own in runs.items():
            figures = "  ".join(f"{what} {median(run[what] for run in own):.2f}" for what in own[0])
            print(f"{tokens:,} tokens, {name}: {figures}", flush=True)


if __name__ == "__main__":
    main()
