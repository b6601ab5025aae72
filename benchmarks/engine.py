"""How fast the embedded engine samples, and what a token costs: python benchmarks/engine.py

Two loads, each on a model of nano's shape (1.05 M parameters) with random weights:
  episodes   ragged conversations of 4 turns (10-60 tokens each), between them tools that sleep 5-50 ms
  batch      64 tokens for every prompt at once, beside transformers' own `generate`

CPU-seconds are what counts: machines differ, and other work goes on beside.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, process_time
from typing import NamedTuple

import anyio
import torch
from agentrl_envs.nano import path
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.engines.transformers import TransformersEngine
from agentrl.types import SamplingParams

VOCABULARY, TURNS, NEW_TOKENS = 512, 4, 64


class Cost(NamedTuple):
    tokens: int
    wall_s: float
    cpu_s: float

    def __str__(self) -> str:
        return f"{self.tokens / self.wall_s:10,.0f} tokens/s {self.cpu_s / self.tokens * 1e3:8.3f} cpu-s/1,000"


def measured(repeats: int, *works: Callable[[], int]) -> list[Cost]:
    """The cheapest of several runs of each, in CPU-seconds a token; they take turns, so all meet the same noise."""
    costs: list[list[Cost]] = [[] for _ in works]
    for _ in range(repeats):
        for work, seen in zip(works, costs, strict=True):
            wall, cpu = perf_counter(), process_time()
            tokens = work()
            seen.append(Cost(tokens, perf_counter() - wall, process_time() - cpu))
    return [min(seen, key=lambda c: c.cpu_s / c.tokens) for seen in costs]


def nano() -> Qwen3ForCausalLM:
    """nano's shape, its weights random."""
    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(path(), initializer_range=0.1)
    return Qwen3ForCausalLM(config).eval()


def some_tokens(rng: random.Random, least: int, most: int) -> list[int]:
    return rng.choices(range(3, VOCABULARY), k=rng.randint(least, most))


def episodes(engine: TransformersEngine, concurrent: int, count: int) -> int:
    """Play ``count`` episodes, so many at a time; the number of sampled tokens."""

    async def episode(number: int) -> int:
        rng = random.Random(number)
        ids, sampled = some_tokens(rng, 40, 70), 0
        for turn in range(TURNS):
            params = SamplingParams(max_tokens=rng.randint(10, 60), seed=TURNS * number + turn)
            done = await engine.generate(ids, params, session=str(number))
            sampled += len(done.token_ids)
            await anyio.sleep(rng.uniform(0.005, 0.05))
            ids += [*done.token_ids, *some_tokens(rng, 8, 20)]
        engine.end_session(str(number))
        return sampled

    async def player(numbers: Sequence[int], totals: list[int]) -> None:
        for number in numbers:
            totals.append(await episode(number))

    async def main() -> int:
        totals: list[int] = []
        async with anyio.create_task_group() as players:
            for first in range(concurrent):
                players.start_soon(player, range(first, count, concurrent), totals)
        return sum(totals)

    return anyio.run(main)


def batch(engine: TransformersEngine, prompts: list[list[int]]) -> int:
    async def main() -> None:
        async with anyio.create_task_group() as callers:
            for seed, ids in enumerate(prompts):
                params = SamplingParams(max_tokens=NEW_TOKENS, seed=seed)
                callers.start_soon(lambda i, p, s: engine.generate(i, p, session=s), ids, params, str(seed))
        for seed in range(len(prompts)):
            engine.end_session(str(seed))

    anyio.run(main)
    return NEW_TOKENS * len(prompts)


def transformers_batch(model: Qwen3ForCausalLM, prompts: list[list[int]]) -> int:
    longest = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
            eos_token_id=None,
        )
    return int((out.shape[1] - longest) * len(prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="inside an operation (default 1)")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--repeats", type=int, default=3, help="the cheapest counts (default 3)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = nano()
    engine = TransformersEngine(model, capacity=max(args.concurrent), threads=args.threads)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.threads} thread(s)")
    for n in args.concurrent:
        episodes(engine, n, n)
        (cost,) = measured(args.repeats, partial(episodes, engine, n, 4 * n))
        print(f"episodes {n:4}   agentrl      {cost}")
    for n in args.concurrent:
        rng = random.Random(n)
        prompts = [some_tokens(rng, 40, 70) for _ in range(n)]
        ours, theirs = measured(
            args.repeats, partial(batch, engine, prompts), partial(transformers_batch, model, prompts)
        )
        ratio = (theirs.cpu_s / theirs.tokens) / (ours.cpu_s / ours.tokens)
        print(f"batch    {n:4}   agentrl      {ours}")
        print(f"                transformers {theirs}   ({ratio:.2f} x ours)")


if __name__ == "__main__":
    main()
