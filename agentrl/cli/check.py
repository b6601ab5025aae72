"""``agentrl check``: does an environment or a tool keep its contract; can a model's chat template be followed?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.cli import settings
from agentrl.config import TrainConfig
from agentrl.errors import ConfigError, nearest
from agentrl.inspection import Finding, check_env, check_tool
from agentrl.layers import build, read_overrides
from agentrl.view.text import visible

HELP = """usage: agentrl check {env,tool,model} NAME [--SETTING VALUE ...]

  agentrl check env shop --env.latency_s 0.01     plays it with policies that have learnt nothing, and finds: resets
                                                  that do not repeat, episodes that see each other, held-up loops,
                                                  splits that overlap, rewards that come for nothing, and more
  agentrl check tool calculator                   calls it with good and bad arguments, cancels it, plays with it
  agentrl check model Qwen/Qwen3-0.6B             whether its chat template can be followed, token by token:
                                                  [--chat_template FILE]

  --tasks N            how many seeds, or episodes, are looked at [8]
  --budget_s SECONDS   of all checks together; what does not fit is skipped, and said [60]
  --allow-writes NAMES tools that may be called though they may change what is outside of the episode: those with
                       @tool(writes=True), and those of an MCP server without its readOnlyHint
  --tools NAMES        more tools for an environment; --tool.NAME.SETTING VALUE sets one

Findings are printed as they come: ok, warn, fail, or skip where nothing was shown. The status is 1 where something
failed, and 0 otherwise.
"""
BUDGET_S = 60.0
OWN = ("tasks", "budget_s", "allow-writes")
HEEDED = {*OWN, "env", "tools", "tool"}
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


class Asked(NamedTuple):
    """The words of a command line, but for the settings."""

    tasks: int = 8
    budget_s: float = BUDGET_S
    allow_writes: Sequence[str] = ()


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
    config, asked = _config(name, words)
    return _show(name, partial(check_env, settings.spec_of(config)), asked)


def _tool(name: str, words: Sequence[str]) -> int:
    config, asked = _config("none", words)
    short = name.partition(":")[0]
    for other in config.tool.keys() - {short}:
        raise ConfigError(f"tool.{other}: {name!r} is what is checked{nearest(other, [short])}")
    return _show(name, partial(check_tool, name, settings=config.tool.get(short)), asked)


def _config(env: str, words: Sequence[str]) -> tuple[TrainConfig, Asked]:
    """Read the words: the settings of the environment and tools, and the command's own."""
    source, given = read_overrides(words)
    for name in given.keys() - HEEDED:
        raise ConfigError(f"{name}: agentrl check takes no such setting{nearest(name, HEEDED)}")
    read = {name.replace("-", "_"): _read_own(name, given[name]) for name in OWN if name in given}
    own = {k: v for k, v in given.items() if k not in OWN}
    return build((source, {**own, "env": {**given.get("env", {}), "name": env}})), Asked(**read)


def _read_own(name: str, value: Any) -> Any:
    """Read one of the command's own words, checked."""
    if name == "allow-writes":
        return value if isinstance(value, list) else str(value).split(",")
    kind = int if name == "tasks" else (int, float)
    if not isinstance(value, kind) or isinstance(value, bool) or not value >= 1:
        whole = "a whole number" if name == "tasks" else "a number of seconds"
        raise ConfigError(f"--{name} is {whole} from 1 on, not {value!r}")
    return value


def _model(name: str, words: Sequence[str]) -> int:
    if words and (len(words) != 2 or words[0] != "--chat_template"):
        raise ConfigError(f"agentrl check takes: model NAME [--chat_template FILE]; not {' '.join(words)!r}")
    from agentrl import policy
    from agentrl.renderer.template import TemplateRenderer

    tokenizer = policy.load_tokenizer(name)
    renderer = TemplateRenderer(
        tokenizer, policy.read_template(words[1] if words else None), policy.load_end_tokens(name)
    )
    print("\n".join(f"{sentence.rstrip('.')}." for sentence in renderer.verdict().split(". ")))
    return 0


def _show(name: str, check: Callable[..., list[Finding]], asked: Asked) -> int:
    """Print findings as they come: coloured on a terminal, lines elsewhere."""
    console = Console()
    with console.status("") if console.is_terminal else nullcontext() as status:
        findings = check(
            **asked._asdict(),
            on_finding=partial(_print, console),
            on_check=(lambda what: status.update(what)) if status is not None else None,
        )
    counts = Counter(f.verdict for f in findings)
    skipped = f", {counts['skip']} skipped" if counts["skip"] else ""
    print(f"\n{name}: {counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed{skipped}")
    return 1 if counts["fail"] else 0


def _print(console: Console, f: Finding) -> None:
    if not console.is_terminal:
        print(f"{f.verdict:<5}{f.what:<20} {visible(f.why, newlines=False)}", flush=True)
        return
    row = Table.grid(padding=(0, 1))
    row.add_column(width=4)
    row.add_column(width=19)
    row.add_row(Text(f.verdict, style=STYLES[f.verdict]), f.what, Text(visible(f.why, newlines=False)))
    console.print(row)
