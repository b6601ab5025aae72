"""``agentrl play``: take the model's turns yourself, or watch a model play."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
from pydantic import Field

from agentrl.cli.arguments import Arguments, Command
from agentrl.cli.human_input import ScriptInput, TerminalInput, UserQuit
from agentrl.cli.transcript import Transcript
from agentrl.environments.spec import EnvSpec
from agentrl.environments.task_sampler import task_integer
from agentrl.errors import ConfigError, UserError
from agentrl.evaluation.scope import check_split
from agentrl.play.human_engine import HumanEngine, ObservedEngine
from agentrl.play.typed_calls import format_demonstration
from agentrl.renderer.json_lines import ChatRenderer
from agentrl.rollout.engine_protocol import Engine
from agentrl.rollout.expert import open_expert_rollout
from agentrl.rollout.rollout import Rollout
from agentrl.settings.loader import build_config
from agentrl.settings.schema import TrainConfig
from agentrl.settings.section import Section
from agentrl.types import Trajectory
from agentrl.view.escaping import escape_controls

TEXT = """\
  agentrl play --env shop
  agentrl play --env shop --script turns.txt --save demonstrations.jsonl
  agentrl play --env shop --expert
  agentrl play --env shop --endpoint http://127.0.0.1:8000/v1 --model NAME

You see what the model sees, and write its turns: text ends the turn; a call such as price(item="lamp") is added to it,
and an empty line sends the calls. At the end you see the rewards.
"""
SECTIONS = ("env", "tools", "tool", "model", "rollout")


class _PlayOptions(Section):
    task: int = Field(0, ge=0, description="the task")
    split: str = Field("train", description="the split of the task: train or test")
    script: Path | None = Field(None, description="take the lines from a file")
    expert: bool = Field(False, description="let the environment's own expert play, and watch")
    endpoint: str | None = Field(
        None, description="URL of a server that speaks OpenAI's chat completions: it plays, and you watch"
    )
    key_env: str = Field("OPENAI_API_KEY", description="the environment variable that holds the endpoint's key")
    save: Path | None = Field(None, description="append the conversation, its tools and rewards as a line of JSON")


def _run(arguments: Arguments[_PlayOptions]) -> int:
    own, config = arguments.options, _read(arguments)
    spec = EnvSpec.from_config(config)
    check_split(spec, own.split, "--split")
    transcript = Transcript()
    try:
        trajectory = anyio.run(_play, own, config, spec, transcript)
    except UserQuit as end:
        print(f"\n{escape_controls(str(end))}")
        return end.status
    transcript.end(trajectory)
    if own.save is not None:
        _save(own.save, format_demonstration(trajectory, transcript.tools, spec.name, own.split))
    return 0


def _read(arguments: Arguments[_PlayOptions]) -> TrainConfig:
    """Build the config. Raises ConfigError for options that do not go together."""
    own, (_, given) = arguments.options, arguments.settings
    acting = [f"--{name}" for name in ("script", "expert", "endpoint") if getattr(own, name)]
    if len(acting) > 1:
        raise ConfigError(f"{' and '.join(acting)} do not go together: one of them acts")
    if own.endpoint is None and "key_env" in own.model_fields_set:
        raise ConfigError("--key_env does nothing without --endpoint: it names the variable that holds its key")
    if own.endpoint is None and "model" in given:
        raise ConfigError("--model is for --endpoint; without it you are the model")
    if own.endpoint is None and "template" in given:
        raise ConfigError(
            "--template is for --endpoint, whose server has a chat template; without it you are the model"
        )
    return build_config(*arguments.layers)


async def _play(own: _PlayOptions, config: TrainConfig, spec: EnvSpec, transcript: Transcript) -> Trajectory:
    async with spec.open(), _open_rollout(own, config, spec, transcript) as rollout:
        count = spec.count(own.split)
        if count is not None and own.task >= count:
            have = f"split {own.split!r} of env {spec.name!r} has {count} tasks"
            raise UserError(f"{have}, 0 to {count - 1}; not {own.task}")
        task = own.task if count is not None else task_integer(own.split, own.task)
        return await rollout.episode(task, seed=config.seed)


@asynccontextmanager
async def _open_rollout(
    own: _PlayOptions, config: TrainConfig, spec: EnvSpec, transcript: Transcript
) -> AsyncIterator[Rollout]:
    """Open the rollout that is shown: of the environment's expert, or of whoever else plays."""
    words = config.template_words
    if own.expert:
        async with open_expert_rollout(spec, config.rollout, words=words, split=own.split) as rollout:
            rollout.engine = ObservedEngine(transcript.show, rollout.engine)
            yield rollout
        return
    async with _open_engine(own, config, transcript) as engine:
        rollout = Rollout.from_config(config.rollout, spec, engine, ChatRenderer(words), own.split)
        if own.endpoint is None:  # a person takes their time
            rollout.limits = replace(rollout.limits, episode_timeout_s=math.inf)
        yield rollout


@asynccontextmanager
async def _open_engine(own: _PlayOptions, config: TrainConfig, transcript: Transcript) -> AsyncIterator[Engine]:
    """Open the engine: an endpoint, a script, or the person at the terminal."""
    if own.endpoint is not None:
        from agentrl.engines.openai_endpoint import EndpointEngine

        model = config.model if "model" in config.model_fields_set else None
        async with EndpointEngine(own.endpoint, model, key_env=own.key_env) as engine:
            yield ObservedEngine(transcript.show, engine)
    elif own.script is not None:
        yield HumanEngine(transcript.show, ScriptInput(own.script, transcript).take)
    else:
        yield HumanEngine(transcript.show, TerminalInput(transcript).take)


def _save(path: Path, line: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise UserError(f"cannot write {str(path)!r}: {error.strerror}") from None
    print(f"appended to {path}")


COMMAND = Command(
    "play",
    "--env NAME [--task 0] [--split train] [--SETTING VALUE ...]",
    TEXT,
    _run,
    _PlayOptions,
    settings=lambda name: name.partition(".")[0] in SECTIONS,
)
