"""``agentrl train``."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from agentrl.cli import settings
from agentrl.cli.settings import loading
from agentrl.cli.summary import show
from agentrl.errors import ConfigError
from agentrl.policy import configured

HELP = """usage: agentrl train [FILE.toml] --env NAME [--SETTING VALUE ...]

  agentrl train --env math-tools
  agentrl train --env shop --env.latency_s 0.2 --steps 60
  agentrl train --env prompts --env.data rows.jsonl --env.rewards accuracy,think_format
  agentrl train --env my_module:MyEnv --model Qwen/Qwen3-0.6B --learner.lr 1e-6
  agentrl train run.toml --seed 1

  agentrl train --resume runs/last                   # goes on from its newest checkpoint; --steps 100 to go further

Later settings win: the model's own recommendations, then the file, then the command line.
"""


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(f"{HELP}\nsettings [default]:\n{settings.help_text()}")
        print("\nand --env.NAME: agentrl list ENV shows an environment's own")
        return 0
    config = configured(*settings.layers(_resumed(words)))
    spec = settings.spec_of(config)
    console = Console()
    if int(os.environ.get("RANK", "0")):  # a further process of the learner: it says nothing
        from agentrl.training import run_config
        from agentrl.watching import Watcher

        run_config(config, spec, Watcher())
        return 0
    with loading(console):  # torch: after whatever can be wrong with the words
        from agentrl.checkpoint import left_behind
        from agentrl.cli.watch import watcher
        from agentrl.training import run_config

    try:
        with watcher(console, config) as watch:
            summary = run_config(config, spec, watch)
    except KeyboardInterrupt:
        if watch.run_folder is not None:
            console.print(left_behind(watch.run_folder), highlight=False, soft_wrap=True)
        raise
    show(console, summary)
    return 128 + signal.Signals[summary["signal"]] if summary["interrupted"] else 0


def _resumed(words: Sequence[str]) -> list[str]:
    """``--resume DIR`` is short for its config.toml, with ``--run.dir DIR --run.resume true``."""
    found = list(words)
    for at, word in enumerate(found):
        name, given, value = word.partition("=")
        if name == "--resume":
            folder = value if given else next(iter(found[at + 1 :]), "")
            if not folder or not (Path(folder) / "config.toml").is_file():
                raise ConfigError(f"--resume: there is no run in {folder!r} (from {Path.cwd()}); no config.toml")
            rest = found[:at] + found[at + 1 + (not given) :]
            real = str(Path(folder).resolve() if Path(folder).is_symlink() else folder)
            return [f"{real}/config.toml", *rest, "--run.dir", real, "--run.resume", "true"]
    return found
