"""``agentrl check``: does an environment or a tool keep its contract; can a model's chat template be followed?"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.cli import settings
from agentrl.cli.inert import inert
from agentrl.config import TrainConfig
from agentrl.errors import ConfigError, nearest
from agentrl.inspection import Finding, check_env, check_tool, failures
from agentrl.layers import build, read_overrides

HELP = """usage: agentrl check {env,tool,model} NAME [--SETTING VALUE ...]

  agentrl check env shop --env.latency_s 0.01     plays it with policies that have learnt nothing, and finds: resets
                                                  that do not repeat, episodes that see each other, held-up loops,
                                                  splits that overlap, rewards that come for nothing, and more
  agentrl check tool calculator                   calls it with good and bad arguments, cancels it, plays with it
  agentrl check model Qwen/Qwen3-0.6B             whether its chat template can be followed, token by token:
                                                  [--chat_template FILE]

  --tasks N        how many seeds, or episodes, are looked at [8]
  --tools NAMES    more tools for an environment; --tool.NAME.SETTING VALUE sets one

The status is 0 where all is well or there are warnings only, and 1 where something failed.
"""
HEEDED = {"tasks", "env", "tools", "tool"}
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(HELP)
        return 0
    kinds = {"env": _env, "tool": _tool, "model": _model}
    if words[0] not in kinds or len(words) < 2 or words[1].startswith("-"):
        hint = nearest(words[0], kinds) if words[0] not in kinds else ""
        raise ConfigError(f"agentrl check takes: env, tool or model NAME; not {' '.join(words)!r}{hint}")
    return kinds[words[0]](words[1], words[2:])


def _env(name: str, words: Sequence[str]) -> int:
    config, tasks = _config(name, words)
    return _show(name, check_env(settings.spec_of(config), tasks=tasks))


def _tool(name: str, words: Sequence[str]) -> int:
    config, tasks = _config("none", words)
    short = name.partition(":")[0]
    for other in config.tool.keys() - {short}:
        raise ConfigError(f"tool.{other}: {name!r} is what is checked{nearest(other, [short])}")
    return _show(name, check_tool(name, settings=config.tool.get(short), tasks=tasks))


def _config(env: str, words: Sequence[str]) -> tuple[TrainConfig, int]:
    """What the words set, and how many tasks."""
    source, given = read_overrides(words)
    for name in given.keys() - HEEDED:
        raise ConfigError(f"{name}: agentrl check takes no such setting{nearest(name, HEEDED)}")
    tasks = given.get("tasks", 8)
    if not isinstance(tasks, int) or isinstance(tasks, bool) or tasks < 1:
        raise ConfigError(f"--tasks is a whole number from 1 on, not {tasks!r}")
    own = {k: v for k, v in given.items() if k != "tasks"}
    return build((source, {**own, "env": {**given.get("env", {}), "name": env}})), tasks


def _model(name: str, words: Sequence[str]) -> int:
    if words and (len(words) != 2 or words[0] != "--chat_template"):
        raise ConfigError(f"agentrl check takes: model NAME [--chat_template FILE]; not {' '.join(words)!r}")
    from agentrl import policy
    from agentrl.renderer.template import TemplateRenderer

    tokenizer = policy.load_tokenizer(name)
    renderer = TemplateRenderer(tokenizer, policy.read_template(words[1] if words else None))
    print("\n".join(f"{sentence.rstrip('.')}." for sentence in renderer.verdict().split(". ")))
    return 0


def _show(name: str, findings: list[Finding]) -> int:
    """A table on a terminal, lines elsewhere."""
    console = Console()
    failed, warned = len(failures(findings)), sum(f.verdict == "warn" for f in findings)
    if console.is_terminal:
        table = Table("", "check", "what was found", box=None, header_style="bold")
        for f in findings:
            table.add_row(Text(f.verdict, style=STYLES[f.verdict]), f.what, Text(inert(f.why)))
        console.print(table)
    else:
        for f in findings:
            print(f"{f.verdict:<5}{f.what:<20} {inert(f.why)}")
    print(f"\n{name}: {len(findings) - failed - warned} ok, {warned} to look at, {failed} failed")
    return 1 if failed else 0
