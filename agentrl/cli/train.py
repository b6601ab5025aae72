"""``agentrl train``."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from pydantic import Field

from agentrl.cli.arguments import Arguments, Command
from agentrl.cli.output import Console, show_loading
from agentrl.cli.summary import print_summary
from agentrl.environments.spec import EnvSpec
from agentrl.errors import ConfigError
from agentrl.models.policy import build_model_config
from agentrl.settings.catalogue import describe_algorithm
from agentrl.settings.loader import Layer, flatten
from agentrl.settings.schema import TrainConfig
from agentrl.settings.section import Section
from agentrl.settings.trust import read_run_layer

TEXT = """\
  agentrl train --env math-tools
  agentrl train --env shop --env.latency_s 0.2 --steps 60
  agentrl train --env prompts --env.data rows.jsonl --env.rewards accuracy,think_format
  agentrl train --env my_module:MyEnv --model Qwen/Qwen3-0.6B --learner.lr 1e-6
  agentrl train run.toml --seed 1

  agentrl train --resume runs/last                   # resumes from its newest checkpoint; --steps 100 to go further

Later settings win: the model's own recommendations, then the file, then the command line.
"""


class ResumeOptions(Section):
    """The options of a verb that makes a run, and resumes it."""

    resume: Path | None = Field(None, description="the folder of a run that resumes from its newest checkpoint")
    trust: bool = Field(
        False, description="follow settings of the folder that load code, start programs or connect; it is remembered"
    )


def _run(arguments: Arguments[ResumeOptions]) -> int:
    config = build_model_config(*build_layers(arguments))
    return run_training(config)


def run_training(config: TrainConfig) -> int:
    """Run what a config says, show it, and return the exit status."""
    spec = EnvSpec.from_config(config)
    describe_algorithm(config)
    console = Console()
    if int(os.environ.get("RANK", "0")):  # a further process of the learner prints nothing
        from agentrl.training.callbacks import Callbacks
        from agentrl.training.train import run_config

        run_config(config, spec, Callbacks([]))
        return 0
    with show_loading(console):  # torch: after whatever can be wrong with the words
        from agentrl.cli.progress import open_display
        from agentrl.library.demonstrations import read_demonstrations
        from agentrl.training.callbacks import Callbacks, load_callbacks
        from agentrl.training.checkpoint import describe_resume
        from agentrl.training.train import run_config

    shown = [] if config.run.resume else read_demonstrations(config, spec)
    try:
        with open_display(console, config) as display:
            named = load_callbacks(config.run.callbacks)
            callbacks = Callbacks([*named, display], named)
            summary = run_config(config, spec, callbacks, demonstrations=shown).summary
    except KeyboardInterrupt:
        if display.run_folder is not None:
            console.print(describe_resume(display.run_folder), highlight=False, soft_wrap=True)
        raise
    print_summary(console, summary)
    return 128 + signal.Signals[summary["signal"]] if summary["interrupted"] else 0


def build_layers(arguments: Arguments[Any]) -> list[Layer]:
    """Put the config of the run to resume first, and its folder last."""
    own: ResumeOptions = arguments.options
    folder = own.resume
    if folder is None and own.trust:
        raise ConfigError("--trust is for --resume, whose folder has settings; what you give here is your own")
    if folder is None:
        return arguments.layers
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"--resume: there is no run in {str(folder)!r} (from {Path.cwd()}); no config.toml")
    folder = folder.resolve() if folder.is_symlink() else folder
    last = ("--resume", {"run": {"dir": str(folder), "resume": True}})
    given = {name: value for _, layer in arguments.layers for name, value in flatten(layer).items()}
    return [read_run_layer(folder, given, trust=own.trust), *arguments.layers, last]


COMMAND = Command(
    "train",
    "[FILE.toml] --env NAME [--SETTING VALUE ...]",
    TEXT,
    _run,
    ResumeOptions,
    settings=lambda name: True,
    footer="and --env.NAME: agentrl list ENV shows an environment's own",
)
