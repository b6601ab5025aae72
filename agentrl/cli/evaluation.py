"""``agentrl eval``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from agentrl.cli import settings
from agentrl.cli.settings import loading
from agentrl.config import Layer, TrainConfig
from agentrl.env import EnvSpec
from agentrl.errors import ConfigError, nearest
from agentrl.evaluation import Measurement, held_out, measure
from agentrl.policy import configured
from agentrl.types import Trajectory

HELP = """usage: agentrl eval --env NAME --model MODEL [--tasks 256] [--first 0] [--split test] [--SETTING VALUE ...]

  agentrl eval --env math-tools --model runs/last
  agentrl eval --env math-tools --model runs/last --first 100000 --tasks 512

Every task is played twice: sampled, as in training, and greedy.

  --tasks N      how many tasks [256]
  --first N      the first task [0]
  --split NAME   which tasks: test or train [test]
"""
OWN: dict[str, Any] = {"tasks": 256, "first": 0, "split": "test"}


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        sections = ["env", "model", "chat_template", "dtype", "seed", "engine", "rollout"]
        print(f"{HELP}\nsettings [default]:\n{settings.help_text(sections)}")
        return 0
    own, layers = _own(settings.layers(words))
    config = configured(*layers)
    spec = settings.spec_of(config.env)
    console = Console()
    sampled, greedy = anyio.run(partial(_measure, config, spec, console, **own))
    _show(console, config, own, sampled, greedy)
    return 0


def _own(layers: list[Layer]) -> tuple[dict[str, Any], list[Layer]]:
    """Take the verb's own settings out of the command line's."""
    *files, (source, given) = layers
    own = {name: given.get(name, default) for name, default in OWN.items()}
    for name, least in (("tasks", 1), ("first", 0)):
        if not isinstance(own[name], int) or own[name] < least:
            raise ConfigError(f"--{name} is a whole number from {least} on, not {own[name]!r}")
    if own["split"] not in ("train", "test"):
        raise ConfigError(
            f"--split is train or test, not {own['split']!r}{nearest(str(own['split']), ['train', 'test'])}"
        )
    return own, [*files, (source, {k: v for k, v in given.items() if k not in OWN})]


async def _measure(
    config: TrainConfig, spec: EnvSpec, console: Console, tasks: int, first: int, split: str
) -> tuple[Measurement, Measurement]:
    with loading(console):
        from agentrl.session import opened

    async with opened(config, spec) as session:
        rollout = session.rollout(split)
        chosen = held_out(spec, tasks, split, first)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task(f"{spec.name}: {len(chosen)} tasks, twice", total=2 * len(chosen))

            def watch(_: Trajectory) -> None:
                progress.advance(bar)

            sampled, _ = await measure(rollout, chosen, seed=config.seed, watch=watch)
            greedy, _ = await measure(rollout, chosen, seed=config.seed, greedy=True, watch=watch)
    return sampled, greedy


def _show(
    console: Console, config: TrainConfig, own: dict[str, Any], sampled: Measurement, greedy: Measurement
) -> None:
    tasks = f"tasks {own['first']} to {own['first'] + sampled.episodes - 1} of split {own['split']}"
    table = Table(
        "", "reward", "± s.e.", "calls/episode", "valid calls", "turns", "faults", box=None, header_style="bold"
    )
    for name, m in (("sampled", sampled), ("greedy", greedy)):
        row = (
            f"{m.reward:.3f}",
            f"{m.error:.3f}",
            f"{m.calls:.2f}",
            f"{m.valid_calls:.0%}",
            f"{m.turns:.2f}",
            str(m.faults),
        )
        table.add_row(name, *row)
    console.print(f"{config.env['name']}, {config.model}, {tasks}")
    console.print(table)
