"""How close the rollout phase comes to the least time it could take: python benchmarks/rollout.py

128 episodes (16 tasks x 8) of math-tools, whose calculator answers at once, after 200 ms, or after a log-normal time
(mean 0.5 s, sigma 1.0, drawn anew for every call). math-tools and not shop, because nano was made for it, because TRL
can be given the same tool (trl_step.py), and because it leaves less to do while tools run: one or two calls an episode,
most of them made at the same moment.

  wall        seconds of ``Rollout.batch``, from the first reset to the last score
  generation  the wall of the same episodes when no tool takes any time. Sampling is seeded by turn, so that the same
              tokens are sampled; "same" is the share of episodes in which they were
  chain       the longest of the episodes, if it had the machine for itself: the seconds its tools slept (of several
              calls in one turn the longest) and, for each token it sampled, what a token costs in episodes that are
              played one at a time, in passes alone. Nothing measured while others played is in it
  limit       the greater one of generation and chain
  ratio       wall / limit; the target is at most 1.15. A strict measure: the limit knows which episode will be slow,
              and lets it go first
  shared      the same ratio, where the chain's own generation is what it took the episode among the others (in the
              run without latency): a fair share of an engine that cannot know who will be slow. Where this one is
              over 1.15 something blocks; where only the strict one is, episodes queued for their first turn
  engine      seconds in which the engine made passes; the rest of the wall it waited for tools, or for Python

Each repeat has tasks of its own, and plays them with every latency; the table shows the medians over the repeats.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple

import anyio
import torch
from agentrl_envs.math_tools import MathTools
from agentrl_tools.calculator import calculator
from rich.console import Console
from rich.table import Table

from agentrl import tool
from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.environments.spec import EnvSpec
from agentrl.models import policy
from agentrl.models.policy import Policy
from agentrl.renderer.template import TemplateRenderer
from agentrl.rollout.episode import EpisodeLimits
from agentrl.rollout.rollout import Rollout
from agentrl.types import Group, Observation, Reply, Step

LATENCIES = {"none": (0.0, 0.0), "200 ms": (0.2, 0.0), "log-normal": (0.5, 1.0)}  # mean seconds, sigma
ALONE = 12  # episodes played one at a time


class SlowMath(MathTools):
    """math-tools with a calculator that takes its time.

    Args:
        mean_s: the mean of what a call takes, in seconds.
        sigma: of the log-normal distribution; 0: every call takes the same.
        draw: other numbers give other latencies.
    """

    tools = ()

    def __init__(self, mean_s: float = 0.0, sigma: float = 0.0, draw: int = 0) -> None:
        super().__init__()
        self.tools = ()  # its own calculator alone
        self.mean_s, self.sigma, self.draw = mean_s, sigma, draw

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[list[float]]:
        """The seconds that the tools of each episode slept, in the order in which the episodes began."""
        yield []

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self.number = len(self.shared)
        self.shared.append(0.0)
        self.random = random.Random(f"latency/{self.draw}/{self.number}")
        return await super().reset(seed=seed, options=options)

    async def step(self, action: Reply) -> Step:
        self.longest = 0.0
        step = await super().step(action)
        self.shared[self.number] += self.longest
        return step

    @tool
    async def calculator(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: numbers, + - * / // % ** and parentheses, such as "(12+7)*3".
        """
        if self.mean_s:
            seconds = self.mean_s * self.random.lognormvariate(-self.sigma * self.sigma / 2, self.sigma)
            self.longest = max(self.longest, seconds)
            await anyio.sleep(seconds)
        return await calculator(expression=expression)


class Phase(NamedTuple):
    """A rollout phase, measured."""

    groups: list[Group]
    slept: list[float]  # by episode
    wall_s: float
    cpu_s: float
    engine_s: float

    @property
    def tokens(self) -> int:
        return sum(t.sampled_tokens for g in self.groups for t in g)

    def chain(self, token_s: float) -> float:
        episodes = [t for g in self.groups for t in g]
        return max(s + token_s * t.sampled_tokens for s, t in zip(self.slept, episodes, strict=True))

    def shared_chain(self, instant: Phase) -> float:
        episodes = [t for g in instant.groups for t in g]
        return max(s + t.timings["generate"] for s, t in zip(self.slept, episodes, strict=True))

    def same(self, other: Phase) -> float:
        """Share of the episodes that have the same tokens."""
        pairs = [(a, b) for g, h in zip(self.groups, other.groups, strict=True) for a, b in zip(g, h, strict=True)]
        return sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs)


class Row(NamedTuple):
    """One latency in one repeat; the docstring of this file says what the numbers are."""

    wall: float
    generation: float
    chain: float
    limit: float
    ratio: float
    shared: float
    engine: float
    cpu: float
    tokens: float
    tokens_per_s: float
    calls: float
    same: float

    @classmethod
    def of(cls, phase: Phase, instant: Phase, token_s: float) -> Row:
        """Of a phase, the same one without latency, and the seconds of a token of a lone episode."""
        chain = phase.chain(token_s)
        limit = max(instant.wall_s, chain)
        calls = sum(len(t.calls) for g in phase.groups for t in g)
        return cls(
            wall=phase.wall_s,
            generation=instant.wall_s,
            chain=chain,
            limit=limit,
            ratio=phase.wall_s / limit,
            shared=phase.wall_s / max(instant.wall_s, phase.shared_chain(instant)),
            engine=phase.engine_s,
            cpu=phase.cpu_s,
            tokens=phase.tokens,
            tokens_per_s=phase.tokens / phase.wall_s,
            calls=calls / sum(len(g.trajectories) for g in phase.groups),
            same=phase.same(instant),
        )


@dataclass
class Bench:
    """The policy and the engine, as they live through a whole training run."""

    policy: Policy
    engine: TransformersEngine
    group_size: int
    seed: int

    async def play(self, tasks: Sequence[int], latency: tuple[float, float], one_at_a_time: bool = False) -> Phase:
        mean_s, sigma = latency
        spec = EnvSpec(SlowMath, mean_s=mean_s, sigma=sigma, draw=self.seed * 1000 + tasks[0])
        renderer = TemplateRenderer(self.policy.tokenizer)  # a new one: nothing is rendered already
        async with spec.open():
            rollout = Rollout(spec, self.engine, renderer, limits=EpisodeLimits(max_turns=5, max_tokens=64))
            wall, cpu = perf_counter(), process_time()
            if one_at_a_time:
                groups = [g for task in tasks for g in await rollout.batch([task], 1, seed=self.seed)]
            else:
                groups = await rollout.batch(tasks, self.group_size, seed=self.seed)
            return Phase(
                groups,
                spec.shared,
                wall_s=perf_counter() - wall,
                cpu_s=process_time() - cpu,
                engine_s=rollout.lanes.cut().seconds["generate"],
            )

    async def repeat(self, tasks: Sequence[int]) -> dict[str, Row]:
        alone = await self.play(tasks[:ALONE], LATENCIES["none"], one_at_a_time=True)
        token_s = alone.engine_s / alone.tokens
        instant = await self.play(tasks, LATENCIES["none"])
        rows = {"none": Row.of(instant, instant, token_s)}
        for name in list(LATENCIES)[1:]:
            rows[name] = Row.of(await self.play(tasks, LATENCIES[name]), instant, token_s)
        return rows


async def measure(args: argparse.Namespace) -> dict[str, Row]:
    torch.set_num_threads(args.threads)
    loaded = policy.load_policy(args.model)
    engine = TransformersEngine(loaded.model, capacity=args.capacity, threads=args.threads)
    bench = Bench(loaded, engine, args.group_size, args.seed)
    await bench.play(range(4), LATENCIES["none"])  # warm
    repeats = [await bench.repeat(range(r * args.tasks, (r + 1) * args.tasks)) for r in range(args.repeats)]
    return {name: Row(*map(median, zip(*(r[name] for r in repeats), strict=True))) for name in LATENCIES}


def table(rows: Mapping[str, Row], title: str) -> Table:
    shown = Table(title=title)
    names = ("wall s", "generation s", "chain s", "limit s", "ratio", "shared", "engine s", "CPU-s", "tokens/s")
    shown.add_column("latency")
    for name in (*names, "calls/episode", "same"):
        shown.add_column(name, justify="right")
    for name, r in rows.items():
        numbers = [f"{n:.2f}" for n in (r.wall, r.generation, r.chain, r.limit, r.ratio, r.shared, r.engine, r.cpu)]
        shown.add_row(name, *numbers, f"{r.tokens_per_s:,.0f}", f"{r.calls:.2f}", f"{r.same:.0%}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--capacity", type=int, default=128, help="rows sampled at once")
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch, inside an operation (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = anyio.run(measure, args)
    title = f"{args.tasks} x {args.group_size} episodes, {args.model}, {args.threads} thread(s), {args.repeats} repeats"
    Console(width=None if Console().is_terminal else 140).print(table(rows, title))


if __name__ == "__main__":
    main()
