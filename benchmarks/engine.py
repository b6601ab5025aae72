"""How fast the embedded engine samples, and what a token costs: python benchmarks/engine.py

Two loads, each on a model of nano's shape (1.05 M parameters) with random weights:
  episodes   ragged conversations of 4 turns (10-60 tokens each), between them tools that sleep 5-50 ms; beside what one
             would write by hand in an afternoon: a transformers model, a static cache with a slot for every row, each
             row at its own position, prompts filled in one at a time, attention padded to the longest row
  batch      64 tokens for every prompt at once, beside transformers' own `generate`

CPU-seconds are what counts: machines differ, and other work goes on beside.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from time import perf_counter, process_time
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import torch
from agentrl_envs.nano import path
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from agentrl.engines.transformers import TransformersEngine
from agentrl.types import Completion, SamplingParams

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


def episodes(engine: TransformersEngine | SlotLoop, concurrent: int, count: int) -> int:
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


class SlotLoop:
    """The loop by hand. It has ``generate`` and ``end_session`` as an engine has, and nothing else."""

    def __init__(self, model: Qwen3ForCausalLM, slots: int, positions: int = 512) -> None:
        self.model, self.config = copy.deepcopy(model), model.config
        self.model.set_attn_implementation("slot_loop")
        layers, heads, dim = self.config.num_hidden_layers, self.config.num_key_value_heads, self.config.head_dim
        self.cache = torch.zeros(layers, 2, slots, heads, positions, dim)
        self.free, self.slots = list(range(slots)), {}
        self.held: dict[int, int] = {}  # slot -> positions that are filled
        self.rows: list[tuple[int, list[int], SamplingParams, anyio.Event]] = []
        self.driving = False

    async def generate(self, ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        if session not in self.slots:
            self.slots[session] = self.free.pop()
            self.held[self.slots[session]] = 0
        slot = self.slots[session]
        with torch.inference_mode():
            sampled = [self._step([slot], [list(ids[self.held[slot] :])])[0]]
        done = anyio.Event()
        self.rows.append((slot, sampled, params, done))
        if not self.driving:
            await self._drive()
        await done.wait()
        return Completion(tuple(sampled), (0.0,) * len(sampled), (0,) * len(sampled), "length")

    def end_session(self, session: str) -> None:
        self.free.append(self.slots.pop(session))

    async def _drive(self) -> None:
        self.driving = True
        while self.rows:
            going = [r for r in self.rows if len(r[1]) < r[2].max_tokens]
            for row in self.rows:
                if len(row[1]) >= row[2].max_tokens:
                    row[3].set()
            self.rows = going
            if going:
                with torch.inference_mode():
                    tokens = self._step([r[0] for r in going], [r[1][-1:] for r in going])
                for row, token in zip(going, tokens, strict=True):
                    row[1].append(token)
            await anyio.lowlevel.checkpoint()  # whoever has waited for a tool comes in
        self.driving = False

    def _step(self, slots: list[int], new: list[list[int]]) -> list[int]:
        held = torch.tensor([self.held[s] for s in slots])
        count = len(new[0])
        positions = held[:, None] + torch.arange(count)
        length = int(positions.max()) + 1
        mask = torch.where(torch.arange(length) <= positions[..., None], 0.0, -torch.inf)[:, None]
        _SLOTS.set((self.cache, torch.tensor(slots), positions, mask))
        hidden = self.model.model(input_ids=torch.tensor(new), position_ids=positions, use_cache=False)
        for slot in slots:
            self.held[slot] += count
        logits = self.model.lm_head(hidden.last_hidden_state[:, -1])
        return torch.multinomial(logits.softmax(-1), 1)[:, 0].tolist()


_SLOTS: ContextVar[tuple[Any, ...]] = ContextVar("slots")


def slot_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> tuple[Any, None]:
    cache, slots, positions, mask = _SLOTS.get()
    keys, values = cache[module.layer_idx]
    keys[slots[:, None], :, positions] = key.transpose(1, 2)
    values[slots[:, None], :, positions] = value.transpose(1, 2)
    seen = (t[slots, :, : mask.shape[-1]] for t in (keys, values))
    return scaled_dot_product_attention(query, *seen, mask, enable_gqa=True).transpose(1, 2), None


AttentionInterface.register("slot_loop", slot_attention)


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
        by_hand = SlotLoop(model, n)
        episodes(engine, n, n)
        ours, theirs = measured(args.repeats, partial(episodes, engine, n, 4 * n), partial(episodes, by_hand, n, 4 * n))
        ratio = (theirs.cpu_s / theirs.tokens) / (ours.cpu_s / ours.tokens)
        print(f"episodes {n:4}   agentrl      {ours}")
        print(f"                by hand      {theirs}   ({ratio:.2f} x ours)")
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
