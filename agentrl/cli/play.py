"""``agentrl play``: sit in the model's chair, or watch somebody sit there."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from agentrl.chair import Chair, Watched
from agentrl.cli import settings
from agentrl.cli.person import Left, Person, Script
from agentrl.cli.table import Table
from agentrl.config import TrainConfig
from agentrl.engine import Engine
from agentrl.env import EnvSpec
from agentrl.errors import ConfigError, UserError, nearest
from agentrl.layers import Layer, build
from agentrl.renderer.chat import ChatRenderer
from agentrl.rollout import Rollout
from agentrl.tasks import task_integer
from agentrl.typed import demonstration
from agentrl.types import Trajectory
from agentrl.view.text import visible

HELP = """usage: agentrl play --env NAME [--task 0] [--split train] [--SETTING VALUE ...]

  agentrl play --env shop
  agentrl play --env shop --script turns.txt --save demonstrations.jsonl
  agentrl play --env shop --endpoint http://127.0.0.1:8000/v1 --model NAME

You see what the model sees, and say what it says: text ends the turn; a call such as price(item="lamp") is added to it,
and an empty line sends the calls. At the end: the rewards.

  --task N         which task [0]
  --split NAME     of which split: train or test [train]
  --script FILE    take the lines from a file
  --endpoint URL   a server that speaks OpenAI's chat completions plays, and you watch
  --key_env NAME   the environment variable that holds the endpoint's key [OPENAI_API_KEY]
  --save FILE      append the conversation, its tools and rewards as a line of JSON
"""
OWN: dict[str, Any] = {
    "task": 0,
    "split": "train",
    "script": None,
    "endpoint": None,
    "key_env": "OPENAI_API_KEY",
    "save": None,
}


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        sections = ("env", "tools", "tool", "model", "rollout")
        told = settings.help_text(lambda name: name.partition(".")[0] in sections)
        print(f"{HELP}\nsettings [default]:\n{told}")
        return 0
    own, config = _read(words)
    spec = settings.spec_of(config)
    table = Table()
    try:
        trajectory = anyio.run(_play, own, config, spec, table)
    except Left as left:
        print(f"\n{visible(str(left))}")
        return left.status
    table.end(trajectory)
    if own["save"] is not None:
        _save(Path(str(own["save"])), demonstration(trajectory, table.tools, spec.name, own["split"]))
    return 0


def _read(words: Sequence[str]) -> tuple[dict[str, Any], TrainConfig]:
    """The verb's own settings, and the others."""
    layers: list[Layer] = settings.layers(words)
    *files, (source, given) = layers
    own = {name: given.get(name, default) for name, default in OWN.items()}
    if not isinstance(own["task"], int) or isinstance(own["task"], bool) or own["task"] < 0:
        raise ConfigError(f"--task is a whole number from 0 on, not {own['task']!r}")
    if own["split"] not in ("train", "test"):
        hint = nearest(str(own["split"]), ["train", "test"])
        raise ConfigError(f"--split is train or test, not {own['split']!r}{hint}")
    if own["script"] is not None and own["endpoint"] is not None:
        raise ConfigError("--script and --endpoint do not go together: one of them plays")
    if own["endpoint"] is None and "model" in given:
        raise ConfigError("--model is for --endpoint; without it you are the model")
    return own, build(*files, (source, {k: v for k, v in given.items() if k not in OWN}))


async def _play(own: dict[str, Any], config: TrainConfig, spec: EnvSpec, table: Table) -> Trajectory:
    async with spec.open(), _engine(own, config, table) as engine:
        count = spec.make().count(own["split"])
        if count is not None and own["task"] >= count:
            have = f"split {own['split']!r} of env {spec.name!r} has {count} tasks"
            raise UserError(f"{have}, 0 to {count - 1}; not {own['task']}")
        rollout = Rollout.configured(config.rollout, spec, engine, ChatRenderer(), own["split"])
        if own["endpoint"] is None:  # a person takes their time
            rollout.limits = replace(rollout.limits, episode_timeout_s=math.inf)
        task = own["task"] if count is not None else task_integer(own["split"], own["task"])
        return await rollout.episode(task, seed=config.seed)


@asynccontextmanager
async def _engine(own: dict[str, Any], config: TrainConfig, table: Table) -> AsyncIterator[Engine]:
    """Who plays."""
    if own["endpoint"] is not None:
        from agentrl.engines.endpoint import EndpointEngine

        model = config.model if "model" in config.model_fields_set else None
        async with EndpointEngine(str(own["endpoint"]), model, key_env=str(own["key_env"])) as engine:
            yield Watched(table.show, engine)
    elif own["script"] is not None:
        yield Chair(table.show, Script(Path(str(own["script"])), table).take)
    else:
        yield Chair(table.show, Person(table).take)


def _save(path: Path, line: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error.strerror}") from None
    print(f"appended to {path}")
