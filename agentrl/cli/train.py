"""``agentrl train``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from agentrl.cli import settings
from agentrl.cli.summary import show

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
        print(f"{HELP}\nsettings [default]:\n{settings.help_text()}\n\nand --env.NAME: agentrl list ENV shows an environment's own")
        return 0
    layers = settings.layers(words)
    console = Console()
    with console.status("loading torch and transformers") if console.is_terminal else _nothing():
        from agentrl.session import configured
        from agentrl.train import run_config
    from agentrl.cli.watch import watcher

    config = configured(*layers)
    spec = settings.spec_of(config.env)
    with watcher(console, config) as watch:
        summary = run_config(config, spec, watch)
    show(console, summary)
    return 130 if summary["interrupted"] else 0


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...
