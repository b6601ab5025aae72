"""``agentrl sft``."""

from __future__ import annotations

from pydantic import Field

from agentrl.cli.arguments import Arguments, Command
from agentrl.cli.train import ResumeOptions, build_layers, run_training
from agentrl.errors import ConfigError
from agentrl.learner.launch_environment import adopt_launcher
from agentrl.models.policy import build_model_config
from agentrl.settings.loader import Layer
from agentrl.settings.schema import TrainConfig
from agentrl.settings.sft import DEFAULTS, build_sft_layer
from agentrl.settings.values import CommaSeparated

TEXT = """\
  agentrl sft --env math-tools --model nano                    # what the environment's own expert plays
  agentrl sft --env shop --data demonstrations.jsonl           # of agentrl play --save, or of messages
  agentrl sft --env shop --data runs/last --where "reward>=1"  # a run's episodes, or an evaluation's
  agentrl sft --env math-tools --model runs/last --rounds 10   # rejection sampling: the policy's own best
  agentrl train --env math-tools --model runs/last             # and then: reinforcement learning

A warm start: the model imitates conversations, tool tokens masked, in its own chat template. The held-out tasks are
evaluated before and after, and the run folder is one like that of agentrl train. Unless you or the model say otherwise:
--epochs 1, --learner.lr 2e-5.
"""
_SHOWN = frozenset(
    [
        "optimizer",
        "optimizer_args",
        "lr",
        "lr_scheduler",
        "lr_scheduler_args",
        "warmup_steps",
        "warmup_ratio",
        "weight_decay",
        "max_grad_norm",
        "max_tokens_per_microbatch",
        "gradient_checkpointing",
        "threads",
    ]
)


class _SftOptions(ResumeOptions):
    data: CommaSeparated | None = Field(
        None, description="expert (the default), files of conversations, run folders; commas between them"
    )
    where: str | None = Field(None, description='of run folders, the episodes that are taken: "reward>=1"')
    rounds: int | None = Field(
        None, ge=1, description="instead of data: batches sampled from the model, of which the best are learned from"
    )


def _run(arguments: Arguments[_SftOptions]) -> int:
    adopt_launcher()
    return run_training(build_sft_config(arguments))


def build_sft_config(arguments: Arguments[_SftOptions]) -> TrainConfig:
    """Build the config of the words. Raises ConfigError for those that do not go together."""
    own = arguments.options
    if own.resume is not None:
        if own.data is not None or own.where is not None or own.rounds is not None:
            raise ConfigError("--resume goes on with the run's own demonstrations; --data, --where, --rounds begin one")
        return build_model_config(*build_layers(arguments))
    if own.rounds is not None and (own.data is not None or own.where is not None):
        raise ConfigError("--rounds samples from the model itself; --data and --where are of other demonstrations")
    given = {"data": list(own.data) if own.data is not None else None, "where": own.where}
    mine: Layer = ("command line", {"sft": {name: value for name, value in given.items() if value is not None}})
    layers = [build_sft_layer(own.rounds), *([mine] if mine[1]["sft"] else []), *build_layers(arguments)]
    return build_model_config(*layers, defaults=DEFAULTS)


def _is_shown(name: str) -> bool:
    """Return True for a setting that the help shows: not those of rollouts, and what only they are learned by."""
    section, _, own = name.partition(".")
    return section not in ("stages", "rollout", "engine") and (section != "learner" or own in _SHOWN)


COMMAND = Command(
    "sft",
    "[FILE.toml] --env NAME [--data expert] [--SETTING VALUE ...]",
    TEXT,
    _run,
    _SftOptions,
    settings=_is_shown,
    footer="and any other setting of agentrl train; --env.NAME: agentrl list ENV shows an environment's own",
)
