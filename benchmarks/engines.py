"""How fast engines sample: python benchmarks/engines.py --systems embedded by-hand generate vllm

  embedded     agentrl's own engine
  by-hand      what one would write in an afternoon: a transformers model, a static cache with a slot for every row,
               each row at its own position, prompts filled in one at a time, attention padded to the longest row
  vllm         vLLM as agentrl runs it (needs it installed: make vllm makes a venv that has it)
  generate     transformers' `generate`, one batch of equal length; it has no episodes
  continuous   transformers' `generate_batch`, its continuous batching; no episodes either

on random weights of nano's shape (1 M parameters) and of a larger one (--size 30), or on models that people have
(--model smollm2-135m gemma3-270m, a folder), with two loads (--loads):

  episodes   ragged conversations of 4 turns (10-60 tokens each), between them tools that sleep 5-50 ms
  batch      64 tokens for every prompt at once

Tokens a second of wall time, and how often the embedded engine's. CPU-seconds for 1,000 tokens are those of this
process alone: vLLM samples in another one. Systems take turns, so that all meet the same noise; the best of --repeats
counts.

Last, an update of the weights: how long it takes while nothing is sampled, and how much longer 64 running requests take
when it happens in their middle. And of what a real training step of nano on math-tools takes, the share that the
update has. Both of random weights alone.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from statistics import fmean
from time import perf_counter, process_time
from typing import Any, NamedTuple, Self

import anyio
import torch
from agentrl_envs.nano import path
from anyio import to_thread
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl import train
from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.models.policy import load_policy
from agentrl.types import Completion, SamplingParams

VOCABULARY, TURNS, NEW_TOKENS = 512, 4, 64


class Cost(NamedTuple):
    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def speed(self) -> float:
        return self.tokens / self.wall_s


async def measured(repeats: int, works: dict[str, Callable[[], Awaitable[int]]]) -> dict[str, Cost]:
    """The quickest of several runs of each."""
    best: dict[str, Cost] = {}
    for _ in range(repeats):
        for name, work in works.items():
            gc.collect()
            wall, cpu = perf_counter(), process_time()
            tokens = await work()
            cost = Cost(tokens, perf_counter() - wall, process_time() - cpu)
            best[name] = max(best.get(name, cost), cost, key=lambda c: c.speed)
    return best


def random_model(millions: int) -> Qwen3ForCausalLM:
    """nano's shape, or a larger one."""
    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(path(), initializer_range=0.1)
    if millions > 1:
        config.update(
            {
                **{"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 9},
                **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "layer_types": None},
            }
        )
        config = Qwen3Config(**{k: v for k, v in config.to_dict().items() if k != "layer_types"})
    return Qwen3ForCausalLM(config).eval()


def some_tokens(rng: random.Random, least: int, most: int) -> list[int]:
    return rng.choices(range(3, VOCABULARY), k=rng.randint(least, most))


async def episodes(engine: Any, concurrent: int, count: int) -> int:
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

    totals: list[int] = []
    async with anyio.create_task_group() as players:
        for first in range(concurrent):
            players.start_soon(player, range(first, count, concurrent), totals)
    return sum(totals)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [some_tokens(rng, 40, 70) for _ in range(count)]


async def batch(engine: Any, count: int, while_running: Callable[[], Awaitable[None]] | None = None) -> int:
    async with anyio.create_task_group() as callers:
        for seed, ids in enumerate(prompts(count)):
            params = SamplingParams(max_tokens=NEW_TOKENS, seed=seed)
            callers.start_soon(lambda i, p, s: engine.generate(i, p, session=s), ids, params, str(seed))
        if while_running is not None:
            await while_running()
    for seed in range(count):
        engine.end_session(str(seed))
    return NEW_TOKENS * count


async def generate(model: Qwen3ForCausalLM, count: int) -> int:
    given = prompts(count)
    longest = max(len(p) for p in given)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in given])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in given])
    how = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0, "eos_token_id": None}
    how["min_new_tokens"] = NEW_TOKENS  # a model's own settings name an end
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, **how)
    return int((out.shape[1] - longest) * count)


async def continuous(model: Qwen3ForCausalLM, count: int) -> int:
    """With room for what is asked: left to itself it takes most of the memory there is."""
    page, longest = 32, 70 + NEW_TOKENS
    room = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=count * (longest // page + 2),
        max_batch_tokens=max(256, 2 * count),
        max_requests_per_batch=count,
        auto_switch_to_flash=False,
        use_cuda_graph=False,
        use_async_batching=False,
    )
    how = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0)
    own = copy.deepcopy(model)  # its attention is exchanged
    done = await to_thread.run_sync(partial(own.generate_batch, prompts(count), how, room))
    return sum(len(d.generated_tokens) for d in done.values())


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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None: ...

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


@asynccontextmanager
async def opened(systems: Sequence[str], model: Qwen3ForCausalLM, most: int, threads: int) -> AsyncIterator[dict]:
    """The engines among the systems, running."""
    makers = {
        "embedded": lambda: TransformersEngine(model, capacity=most, threads=threads),
        "by-hand": lambda: SlotLoop(model, most),
        "vllm": lambda: vllm_engine(model, most, threads),
    }
    async with AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(makers[name]()) for name in systems if name in makers}


def vllm_engine(model: Qwen3ForCausalLM, most: int, threads: int) -> Any:
    from agentrl.engines.vllm.engine import VLLMEngine

    return VLLMEngine(model, capacity=most, threads=threads)


def shown(table: Table, load: str, count: int, costs: dict[str, Cost]) -> None:
    for name, cost in costs.items():
        ratio = f"{cost.speed / costs['embedded'].speed:.2f}" if "embedded" in costs else ""
        cpu = "" if name == "vllm" else f"{cost.cpu_s / cost.tokens * 1e3:.3f}"
        table.add_row(load, str(count), name, f"{cost.speed:,.0f}", ratio, cpu, end_section=name == list(costs)[-1])
        load = ""


async def updates(engine: Any, model: Qwen3ForCausalLM, count: int) -> tuple[float, float]:
    """Seconds of an update when nothing runs; and what one in the middle of a batch adds to it."""
    times, version = [], engine.version

    async def update() -> None:
        nonlocal version
        version += 1
        await engine.update_weights(model, version)

    for _ in range(5):
        begun = perf_counter()
        await update()
        times.append(perf_counter() - begun)

    async def in_the_middle(share: float) -> None:
        await anyio.sleep(share)
        await update()

    async def timed(while_running: Callable[[], Awaitable[None]] | None = None) -> float:
        begun = perf_counter()
        await batch(engine, count, while_running)
        return perf_counter() - begun

    alone = min([await timed() for _ in range(3)])
    disturbed = min([await timed(partial(in_the_middle, alone / 2)) for _ in range(3)])
    return min(times), disturbed - alone


def share(engine: str) -> tuple[float, float]:
    """Mean seconds of an update in a training of nano on math-tools, and of a whole step."""
    with tempfile.TemporaryDirectory() as folder:
        train("math-tools", steps=6, engine=engine, eval={"every": 0, "final_tasks": 1}, run={"dir": f"{folder}/run"})
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step_time" in row][1:]
    return fmean(row["time/sync"] for row in steps), fmean(row["step_time"] for row in steps)


async def main(args: argparse.Namespace) -> None:
    console = Console(width=None if Console().is_terminal else 100)
    for name, model in models(args):
        count = sum(p.numel() for p in model.parameters())
        table = Table("load", "at once", "system", "tokens/s", "x embedded", "CPU-s / 1,000")
        table.title = f"{name}{count / 1e6:.1f} M parameters, {args.threads} thread(s)"
        others = {"generate": generate, "continuous": continuous}
        async with opened(args.systems, model, max(args.concurrent), args.threads) as engines:
            for n in args.concurrent if "episodes" in args.loads else ():
                works = {name: partial(episodes, engine, n, max(8, 2 * n)) for name, engine in engines.items()}
                shown(table, "episodes", n, await measured(args.repeats, works))
            for n in args.concurrent if "batch" in args.loads else ():
                works = {name: partial(batch, engine, n) for name, engine in engines.items() if name != "by-hand"}
                works |= {name: partial(others[name], model, n) for name in args.systems if name in others}
                shown(table, "batch", n, await measured(args.repeats, works))
            console.print(table)
            for name in ("embedded", "vllm"):
                if name in engines and not args.model:
                    alone, added = await updates(engines[name], model, min(64, max(args.concurrent)))
                    console.print(f"weights to {name}: {alone * 1e3:.1f} ms alone; in flight {added * 1e3:+.0f} ms")
    for name, engine in {"embedded": "transformers", "vllm": "vllm"}.items():
        if name in args.systems and not args.model:
            sync, step = share(engine)
            console.print(f"training with {name}: {sync * 1e3:.0f} ms of a step's {step:.2f} s are the update's")


def models(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The models that are asked for, one after the other, with a name for the table."""
    for name in args.model:
        yield f"{name}, {args.dtype}, ", load_policy(name, args.dtype).model
    for size in args.size if not args.model else ():
        yield "", random_model(size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=["embedded", "by-hand", "generate"])
    parser.add_argument("--size", type=int, nargs="+", default=[1], help="millions of parameters: 1, 30")
    parser.add_argument("--model", nargs="+", default=[], help="models by name, instead of random weights")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of a model by name")
    parser.add_argument("--loads", nargs="+", default=["episodes", "batch"], choices=["episodes", "batch"])
    parser.add_argument("--threads", type=int, default=1, help="inside an operation (default 1)")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--repeats", type=int, default=3, help="the quickest counts (default 3)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    anyio.run(main, arguments)
