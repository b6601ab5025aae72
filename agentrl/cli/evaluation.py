"""``agentrl eval``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from agentrl.cli import settings
from agentrl.cli.settings import loading
from agentrl.config import TrainConfig
from agentrl.env import EnvSpec
from agentrl.errors import ConfigError, nearest
from agentrl.evaluation import Measurement, Playing, at_endpoint, held_out, measure, with_model
from agentrl.layers import Layer, build
from agentrl.policy import configured
from agentrl.types import Trajectory

HELP = """usage: agentrl eval --env NAME --model MODEL [--tasks 256] [--first 0] [--split test] [--SETTING VALUE ...]

  agentrl eval --env math-tools --model runs/last
  agentrl eval --env math-tools --model runs/last --first 100000 --tasks 512
  agentrl eval --env math-tools --endpoint http://127.0.0.1:8000/v1 --model NAME

Every task is played twice: sampled, as in training, and greedy.

  --tasks N        how many tasks [256]
  --first N        the first task [0]
  --split NAME     which tasks: test or train [test]
  --endpoint URL   ask a server that speaks OpenAI's chat completions; tools are called as its API calls them
  --key_env NAME   the environment variable that holds the endpoint's key [OPENAI_API_KEY]
"""
OWN: dict[str, Any] = {"tasks": 256, "first": 0, "split": "test", "endpoint": None, "key_env": "OPENAI_API_KEY"}


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        sections = ["env", "model", "chat_template", "dtype", "seed", "engine", "rollout"]
        print(f"{HELP}\nsettings [default]:\n{settings.help_text(sections)}")
        return 0
    own, layers = _own(settings.layers(words))
    config = configured(*layers) if own["endpoint"] is None else build(*layers)
    spec = settings.spec_of(config)
    console = Console()
    if own["endpoint"] is None:
        with loading(console):
            import agentrl.session  # noqa: F401  brings torch
        playing = with_model(config, spec)
    else:
        model = config.model if any("model" in given for _, given in layers) else None
        playing = at_endpoint(config, spec, own["endpoint"], model, str(own["key_env"]))
    sampled, greedy = anyio.run(_measure, playing, config, spec, console, own)
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
    if not isinstance(own["endpoint"], str | None):
        raise ConfigError(f"--endpoint is a URL such as http://127.0.0.1:8000/v1, not {own['endpoint']!r}")
    return own, [*files, (source, {k: v for k, v in given.items() if k not in OWN})]


async def _measure(
    playing: Playing,
    config: TrainConfig,
    spec: EnvSpec,
    console: Console,
    own: dict[str, Any],
) -> tuple[Measurement, Measurement]:
    async with playing as rollout_of:
        rollout = rollout_of(own["split"])
        chosen = held_out(spec, own["tasks"], own["split"], own["first"])
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
    who = config.model if own["endpoint"] is None else own["endpoint"]
    console.print(f"{config.env['name']}, {who}, {tasks}")
    console.print(table)
