"""``agentrl check``: environments, tools and agents against their contract, models by their chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

from pydantic import Field
from rich.table import Table
from rich.text import Text

from agentrl.agents.forms import parse_agent
from agentrl.checks import Finding, check_agent, check_env, check_tool
from agentrl.cli.arguments import Arguments, Command
from agentrl.cli.output import Console, show_loading
from agentrl.environments.spec import EnvSpec
from agentrl.errors import ConfigError, TemplateError, suggest
from agentrl.settings import registry
from agentrl.settings.loader import build_config
from agentrl.settings.schema import TrainConfig
from agentrl.settings.section import Section
from agentrl.settings.values import CommaSeparated
from agentrl.view.escaping import escape_controls

TEXT = """\
  agentrl check env shop --env.latency_s 0.01     runs it with untrained policies, and finds: resets
                                                  that do not repeat, episodes that see each other, held-up loops,
                                                  splits that overlap, rewards that come for nothing, and more
  agentrl check tool calculator                   calls it with good and bad arguments, cancels it, rolls out episodes
  agentrl check model Qwen/Qwen3-0.6B             follows its chat template, and shows a conversation token by token:
                                                  [--chat_template FILE] [--call_format NAME] [--template.WORD VALUE]
  agentrl check agent my_agent.py:solve           lets it play a scripted policy [--env NAME]: what it speaks, whether
                                                  it sends its history as it was, calls the tools, and ends

Findings are printed as they come: ok, warn, fail, or skip where nothing was shown. The status is 1 if something failed,
or if a model cannot be trained over several turns, and 0 otherwise.
"""
FOOTER = (
    """--tools NAMES adds tools to an environment, --tool.NAME.SETTING VALUE sets one; so does --env.SETTING VALUE."""
)
BUDGET_S = 60.0
SETTINGS = {"env", "tools", "tool"}
MODEL_SETTINGS = {"chat_template", "call_format", "template", "load"}
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


class _CheckOptions(Section):
    tasks: int = Field(8, ge=1, description="seeds, or episodes, to look at")
    budget_s: float = Field(
        BUDGET_S, ge=1, description="seconds for all checks together; what does not fit is skipped, and says so"
    )
    allow_writes: CommaSeparated = Field(
        (),
        description="tools to call though they may change what is outside of the episode: those with "
        "@tool(writes=True), and those of an MCP server without its readOnlyHint; commas between them",
    )


def _run(arguments: Arguments[_CheckOptions]) -> int:
    kind, name = arguments.names
    checks = {"env": _check_env, "tool": _check_tool, "model": _check_model, "agent": _check_agent}
    if kind not in checks:
        raise COMMAND.refuse(arguments.names, suggest(kind, checks))
    return checks[kind](name, arguments)


def _check_env(name: str, arguments: Arguments[_CheckOptions]) -> int:
    spec = EnvSpec.from_config(_build_config(name, arguments))
    return _print_findings(name, partial(check_env, spec), arguments.options)


def _check_tool(name: str, arguments: Arguments[_CheckOptions]) -> int:
    config = _build_config("none", arguments)
    short = registry.derive_settings_key(name)
    for other in config.tool.keys() - {short}:
        raise ConfigError(f"tool.{other}: {name!r} is what is checked{suggest(other, [short])}")
    check = partial(check_tool, name, settings=config.tool.get(short))
    return _print_findings(name, check, arguments.options)


def _check_agent(name: str, arguments: Arguments[_CheckOptions]) -> int:
    source, given = arguments.settings
    for other in given.keys() - SETTINGS:
        raise ConfigError(
            f"{other}: agentrl check agent takes --env NAME and its settings alone{suggest(other, SETTINGS)}"
        )
    for option in arguments.options.model_fields_set - {"budget_s", "allow_writes"}:
        raise ConfigError(
            f"{option}: agentrl check agent takes --budget_s SECONDS, --allow_writes TOOLS and --env NAME alone"
        )
    config = build_config(("agentrl check", {"env": "math-tools"}), (source, given))
    agent, spec = parse_agent(name, 1), EnvSpec.from_config(config)
    if spec.brings_agent:
        raise ConfigError(
            f"env {spec.name!r} plays its episodes itself, without an agent: agentrl check env {spec.name}"
        )
    check = partial(check_agent, agent, spec)
    return _print_findings(name, lambda tasks, **options: check(**options), arguments.options)


def _build_config(env: str, arguments: Arguments[_CheckOptions]) -> TrainConfig:
    """Build the config of an environment and its tools. Raises ConfigError for other settings."""
    source, given = arguments.settings
    for name in given.keys() - SETTINGS:
        known = [*SETTINGS, *_CheckOptions.model_fields]
        raise ConfigError(f"{name}: agentrl check takes no such setting{suggest(name, known)}")
    return build_config((source, {**given, "env": {**given.get("env", {}), "name": env}}))


def _check_model(name: str, arguments: Arguments[_CheckOptions]) -> int:
    """Print what a model's chat template allows. Return 1 if the model cannot be trained over several turns."""
    _, given = arguments.settings
    for other in given.keys() - MODEL_SETTINGS | arguments.options.model_fields_set:
        raise ConfigError(
            f"{other}: agentrl check model takes --chat_template FILE or NAME, --call_format NAME, --template.WORD "
            "VALUE and --load.NAME VALUE alone"
        )
    from agentrl.cli.template_page import print_page, print_refusal
    from agentrl.models import policy
    from agentrl.models.call_formats import build_call_format
    from agentrl.renderer.chat_template import check_words
    from agentrl.renderer.shown_conversation import show_conversation
    from agentrl.renderer.template import TemplateRenderer

    console = Console(highlight=False)
    settings = {key: given[key] for key in ("load", "template") if key in given}
    config = build_config(("command line", {"env": "none", **settings}))
    with show_loading(console):
        tokenizer = policy.load_tokenizer(name, config.load)
        template = policy.find_template(tokenizer, given.get("chat_template"))
        calls = build_call_format(given.get("call_format", "auto"))
        ends = policy.load_end_tokens(name, config.load)
        try:
            renderer = TemplateRenderer(tokenizer, template, ends, calls, history=config.history)
            words = renderer.list_words()
            check_words(config.template_words, words)
            renderer = renderer.with_words(config.template_words)
            found, shown = renderer.describe(), show_conversation(renderer)
        except TemplateError as error:
            print_refusal(console, name, str(error))
            return 1
    return 0 if print_page(console, name, found, words, shown) else 1


def _print_findings(name: str, check: Callable[..., list[Finding]], options: _CheckOptions) -> int:
    """Print findings as they come: coloured on a terminal, lines elsewhere."""
    console = Console()
    with console.status("") if console.is_terminal else nullcontext() as status:
        findings = check(
            **options.model_dump(),
            on_finding=partial(_print_finding, console),
            on_check=(lambda what: status.update(what)) if status is not None else None,
        )
    counts = Counter(f.verdict for f in findings)
    skipped = f", {counts['skip']} skipped" if counts["skip"] else ""
    print(f"\n{name}: {counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed{skipped}")
    return 1 if counts["fail"] else 0


def _print_finding(console: Console, f: Finding) -> None:
    if not console.is_terminal:
        print(f"{f.verdict:<5}{f.what:<20} {escape_controls(f.why, newlines=False)}", flush=True)
        return
    row = Table.grid(padding=(0, 1))
    row.add_column(width=4)
    row.add_column(width=19)
    row.add_row(Text(f.verdict, style=STYLES[f.verdict]), f.what, Text(escape_controls(f.why, newlines=False)))
    console.print(row)


COMMAND = Command(
    "check",
    "{env,tool,model,agent} NAME [--SETTING VALUE ...]",
    TEXT,
    _run,
    _CheckOptions,
    names=(2, 2),
    settings=lambda name: False,
    footer=FOOTER,
)
