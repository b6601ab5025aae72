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
from agentrl.learner.launch_environment import adopt_launcher
from agentrl.models.policy import build_model_config
from agentrl.settings.catalogue import describe_algorithm
from agentrl.settings.loader import Layer, flatten
from agentrl.settings.schema import TrainConfig
from agentrl.settings.section import Section
from agentrl.settings.trust import read_run_layer
from agentrl.settings.values import RunLauncherName

TEXT = """\
  agentrl train --env math-tools
  agentrl train --env shop --env.latency_s 0.2 --steps 60
  agentrl train --env prompts --env.data rows.jsonl --env.rewards accuracy,think_format
  agentrl train --env my_module:MyEnv --model Qwen/Qwen3-0.6B --learner.lr 1e-6
  agentrl train run.toml --seed 1

  agentrl train --resume runs/last                   # resumes from its newest checkpoint; --steps 100 to go further
  agentrl train --launcher ray --ranks 4 --servers 2 --players 8 --env math-tools --model Qwen/Qwen3-0.6B

Later settings win: the model's own recommendations, then the file, then the command line.
"""


class ResumeOptions(Section):
    """The options of a verb that makes a run, and resumes it."""

    resume: Path | None = Field(None, description="the folder of a run that resumes from its newest checkpoint")
    trust: bool = Field(
        False, description="follow settings of the folder that load code, start programs or connect; it is remembered"
    )


class TrainOptions(ResumeOptions):
    launcher: RunLauncherName | None = Field(
        None,
        description="what starts the processes of the run: agentrl list run_launchers; local where there are several",
    )
    ranks: int = Field(1, ge=1, description="processes of the learner that the launcher starts")
    servers: int = Field(0, ge=0, description="vLLM servers that the launcher starts, which the run samples from")
    serve: dict[str, Any] = Field({}, description="of each server, as for agentrl serve: --serve.tp 4")
    cpus: float = Field(1.0, gt=0, description="CPUs of a node, for each rank and each server, on Ray")
    require_gpus: bool = Field(
        False,
        description="ask for a GPU for each rank, and for servers', also where an autoscaler has yet to start them",
    )
    max_restarts: int = Field(3, ge=0, description="how often the ranks begin again, after one of them has ended")
    wait_s: float = Field(60.0, ge=0, description="how long the launcher waits for room on a cluster")


_LAUNCHED = ("ranks", "servers", "serve", "cpus", "require_gpus", "max_restarts", "wait_s")


def _run(arguments: Arguments[TrainOptions]) -> int:
    adopt_launcher()
    own = arguments.options
    if own.launcher is not None or own.ranks > 1 or own.servers:
        from agentrl.cli.launched_run import launch_run

        return launch_run(arguments, own.launcher or "local", build_layers)
    if given := [name for name in _LAUNCHED if name in own.model_fields_set]:
        raise ConfigError(
            f"--{given[0]} is for what a launcher starts, and nothing does: --launcher, --ranks, --servers"
        )
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
    TrainOptions,
    settings=lambda name: True,
    footer="and --env.NAME: agentrl list ENV shows an environment's own",
)
