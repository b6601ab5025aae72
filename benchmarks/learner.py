"""A learner's pass over a batch, ours and TRL 1.16's own loss, in one run: python benchmarks/learner.py

The same model (Qwen3, about 13 M parameters, random weights), the same rows, the same objective (DAPO, on-policy, no
KL); forward and backward, no optimizer. Each side of each workload runs in a process of its own, one after the other.

  short math     16 groups of 8: prompts of 40-70 tokens, answers of about 50
  heavy tail     2 groups of 8: prompts of 200-1500 tokens; log-normal answers, median 600, sigma 0.8, at most 4096,
                 a fifth of their tokens not sampled (tool results)
  long schemas   4 groups of 8: prompts of 2000 tokens, answers of 200

  tokens/s   trained tokens a second of wall time
  peak       memory above what the process held before the pass
  useful     share of the tokens that went through the model which are real and stand there for the first time

Every row has an advantage, and no two answers begin alike: what we save where groups agree is not in these numbers.
TRL gets rows in micro-batches of its default size, 8, ours are of --max-tokens-per-microbatch tokens.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.learner.hidden_states import PREFIX
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.logprobs import token_logprobs
from agentrl.learner.packing import pack_by_prefix
from agentrl.learner.row_arrays import RowArrays
from agentrl.types import Sample

VOCABULARY, GROUP, TRL_ROWS = 8192, 8, 8


class Cost(NamedTuple):
    seconds: float
    trained: int
    peak_bytes: int
    useful: float
    gradient: float  # its norm, to see that both did the same


class Row(NamedTuple):
    prompt: list[int]
    answer: list[int]
    sampled: list[int]  # 1 or 0 for each token of the answer
    advantage: float

    @property
    def sample(self) -> Sample:
        mask = [0] * len(self.prompt) + self.sampled
        return Sample(self.prompt + self.answer, mask, [-9.0 * m for m in mask], [self.advantage] * len(mask))


# -- workloads -------------------------------------------------------------------------------------------------------


def rows(groups: int, prompt: Callable[[], int], answer: Callable[[], int], tools: float = 0.0) -> list[Row]:
    rng = random.Random(0)

    def some(count: int) -> list[int]:
        return rng.choices(range(1, VOCABULARY), k=count)

    found = []
    for _ in range(groups):
        question = some(prompt())
        for member in range(GROUP):
            ids = some(answer())
            told = round(tools * len(ids))  # one tool result in the middle
            at = (len(ids) - told) // 2
            sampled = [int(not at <= i < at + told) for i in range(len(ids))]
            found.append(Row(question, ids, sampled, 1.0 if member % 2 else -1.0))
    return found


def workload(name: str, scale: float) -> list[Row]:
    rng = random.Random(name)

    def groups(count: int) -> int:
        return max(1, round(count * scale))

    if name == "short math":
        return rows(groups(16), lambda: rng.randint(40, 70), lambda: rng.randint(20, 80))
    if name == "heavy tail":
        length = lambda: min(4096, round(600 * rng.lognormvariate(0.0, 0.8)))  # noqa: E731
        return rows(groups(2), lambda: rng.randint(200, 1500), length, tools=0.2)
    return rows(groups(4), lambda: 2000, lambda: 200)


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


# -- both sides ------------------------------------------------------------------------------------------------------


class Norm(torch.optim.SGD):
    """No step; the gradient's norm."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.norm = float(torch.stack(grads).norm())


def ours(given: list[Row], max_tokens_per_microbatch: int) -> Cost:
    policy = model()
    recorder = Norm(policy.parameters(), lr=0.0)
    settings = LossSettings(
        max_tokens_per_microbatch=max_tokens_per_microbatch, max_grad_norm=1e12, threads=torch.get_num_threads()
    )
    learner = Learner(policy, [recorder], settings)
    samples = on_policy(policy, [r.sample for r in given], max_tokens_per_microbatch)
    learner.update(samples[:2])  # warm, and it has shown that prefixes can be shared
    arrays = [RowArrays.read(sample) for sample in samples]
    forests = [b.forest for b in pack_by_prefix(arrays, [1.0] * len(arrays), max_tokens_per_microbatch)]
    through = sum(len(f.token_ids) for f in forests)
    with measured() as result:
        learner.update(samples)
    return Cost(result.seconds, trained(given), result.peak, distinct(given) / through, recorder.norm)


@torch.no_grad()
def on_policy(policy: Qwen3ForCausalLM, samples: list[Sample], max_tokens_per_microbatch: int) -> list[Sample]:
    """With the policy's own logprobs, as an exact engine would give them: the ratios are 1."""
    arrays, found = [RowArrays.read(sample) for sample in samples], []
    by_row = {id(row): sample for row, sample in zip(arrays, samples, strict=True)}
    for batch in pack_by_prefix(arrays, [1.0] * len(arrays), max_tokens_per_microbatch):
        states = PREFIX.compute_states(policy, batch)
        logprobs, _ = token_logprobs(policy.lm_head, states, batch.targets)
        values = iter(logprobs.tolist())
        for row in batch.rows:
            sample = by_row[id(row)]
            found.append(replace(sample, logprobs=[next(values) if mask else 0.0 for mask in sample.loss_mask]))
    return found


def trl(given: list[Row], max_tokens_per_microbatch: int) -> Cost:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.filterwarnings("ignore")
    from agentrl_envs import nano
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    steps = len(given) // TRL_ROWS
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=TRL_ROWS,
            gradient_accumulation_steps=steps,
            num_generations=GROUP,
            loss_type="dapo",
            epsilon_high=0.28,
            beta=0.0,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
        )
        trainer = GRPOTrainer(
            model=model(),
            args=config,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_list([{"prompt": "x"}] * len(given)),
            processing_class=AutoTokenizer.from_pretrained(nano.path()),
        )
    trainer.current_gradient_accumulation_steps = steps
    trainer.model.train()
    inputs = padded(given)
    with measured() as result:
        for at in range(0, len(given), TRL_ROWS):
            batch = {k: v[at : at + TRL_ROWS] for k, v in inputs.items()}
            batch["num_items_in_batch"] = torch.tensor(float(trained(given)))
            trainer._compute_loss(trainer.model, batch).backward()
    recorder = Norm(trainer.model.parameters(), lr=0.0)
    recorder.step()
    tokens = inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
    return Cost(result.seconds, trained(given), result.peak, distinct(given) / tokens, recorder.norm)


def padded(given: list[Row]) -> dict[str, torch.Tensor]:
    """TRL's batch: prompts padded on the left, completions on the right, each to the longest of all."""
    before, after = max(len(r.prompt) for r in given), max(len(r.answer) for r in given)

    def right(values: list[int]) -> list[int]:
        return values + [0] * (after - len(values))

    return {
        "prompt_ids": torch.tensor([[0] * (before - len(r.prompt)) + r.prompt for r in given]),
        "prompt_mask": torch.tensor([[0] * (before - len(r.prompt)) + [1] * len(r.prompt) for r in given]),
        "completion_ids": torch.tensor([right(r.answer) for r in given]),
        "completion_mask": torch.tensor([right([1] * len(r.answer)) for r in given]),
        "tool_mask": torch.tensor([right(r.sampled) for r in given]),
        "advantages": torch.tensor([r.advantage for r in given]),
    }


def trained(given: list[Row]) -> int:
    return sum(sum(r.sampled) for r in given)


def distinct(given: list[Row]) -> int:
    """Tokens, a group's prompt once."""
    return sum(len(p) for p in {tuple(r.prompt) for r in given}) + sum(len(r.answer) for r in given)


# -- measuring -------------------------------------------------------------------------------------------------------


class Result:
    seconds: float
    peak: int


@contextmanager
def measured() -> Iterator[Result]:
    result, over = Result(), threading.Event()
    gc.collect()
    before = most = resident()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.01):
            most = max(most, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = perf_counter()
    yield result
    result.seconds = perf_counter() - begun
    over.set()
    watcher.join()
    result.peak = most - before


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def apart(
    side: Callable[[list[Row], int], Cost], given: list[Row], max_tokens_per_microbatch: int, threads: int
) -> Cost:
    with multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (threads,)) as pool:
        return pool.apply(side, (given, max_tokens_per_microbatch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=["short math", "heavy tail", "long schemas"])
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of groups (default 1)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens-per-microbatch", type=int, default=4096)
    args = parser.parse_args()
    table = Table("workload", "", "tokens/s", "peak", "useful", "gradient", title=f"{args.threads} thread(s)")
    for name in args.workload:
        given = workload(name, args.scale)
        us, them = (apart(side, given, args.max_tokens_per_microbatch, args.threads) for side in (ours, trl))
        for side, c in (("agentrl", us), ("TRL", them)):
            numbers = f"{c.trained / c.seconds:,.0f}", f"{c.peak_bytes / 2**20:,.0f} MiB", f"{c.useful:.2f}"
            table.add_row(name if c is us else "", side, *numbers, f"{c.gradient:.5g}")
        speed, memory = them.seconds / us.seconds, us.peak_bytes / them.peak_bytes
        table.add_row("", "ratio", f"{speed:.1f} x", f"{memory:.2f} x", end_section=True)
    Console(width=None if Console().is_terminal else 100).print(table)


if __name__ == "__main__":
    main()
