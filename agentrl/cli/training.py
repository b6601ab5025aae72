"""``agentrl train``."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console

from agentrl.cli import settings
from agentrl.cli.settings import loading
from agentrl.cli.summary import show
from agentrl.policy import configured

HELP = """usage: agentrl train [FILE.toml] --env NAME [--SETTING VALUE ...]

  agentrl train --env math-tools
  agentrl train --env shop --env.latency_s 0.2 --steps 60
  agentrl train --env prompts --env.data rows.jsonl --env.rewards accuracy,think_format
  agentrl train --env my_module:MyEnv --model Qwen/Qwen3-0.6B --learner.lr 1e-6
  agentrl train run.toml --seed 1

Later settings win: the model's own recommendations, then the file, then the command line.
"""


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(f"{HELP}\nsettings [default]:\n{settings.help_text()}")
        print("\nand --env.NAME: agentrl list ENV shows an environment's own")
        return 0
    config = configured(*settings.layers(words))
    spec = settings.spec_of(config.env)
    console = Console()
    if int(os.environ.get("RANK", "0")):  # a further process of the learner: it says nothing
        from agentrl.training import run_config
        from agentrl.watching import Watcher

        run_config(config, spec, Watcher())
        return 0
    with loading(console):  # torch: after whatever can be wrong with the words
        from agentrl.cli.watch import watcher
        from agentrl.training import run_config

    with watcher(console, config) as watch:
        summary = run_config(config, spec, watch)
    show(console, summary)
    return 130 if summary["interrupted"] else 0
