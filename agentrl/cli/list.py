"""``agentrl list``: what is registered, here and by plugins; ``agentrl list NAME``: one of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from agentrl.cli.arguments import Arguments, Command, NoOptions
from agentrl.cli.output import Console, print_line
from agentrl.environments.env import Env
from agentrl.errors import UserError, suggest
from agentrl.settings import registry
from agentrl.settings.catalogue import CHOICES
from agentrl.settings.entries import Entry
from agentrl.settings.registry import RegistryKind
from agentrl.settings.signature import build_arguments_model
from agentrl.tools.tool import Tool

TEXT = """\
  agentrl list                      # the environments, tools, rewards and models
  agentrl list losses               # or advantages, importance_sampling, optimizers, samplers, engines, callbacks
  agentrl list dapo                 # one of them: what it is, and its settings
  agentrl list my_losses.py:mine    # of a file, or of a module
"""
KINDS: tuple[RegistryKind, ...] = ("env", "tool", "reward", "model")
_PLURALS: Mapping[str, RegistryKind] = {
    **{"envs": "env", "tools": "tool", "rewards": "reward", "models": "model", "callbacks": "callback"},
    **{"losses": "loss", "advantages": "advantage", "importance_sampling": "importance_sampling"},
    **{"optimizers": "optimizer", "samplers": "sampler", "engines": "engine", "call_formats": "call_format"},
    **{"metrics": "metric", "panels": "panel", "launchers": "launcher", "player_launchers": "player_launcher"},
    **{"run_launchers": "run_launcher"},
}


def _run(arguments: Arguments[NoOptions]) -> int:
    name = arguments.names[0] if arguments.names else ""
    if name in _PLURALS:
        _print_all(Console(), (_PLURALS[name],))
    elif name:
        print(_describe_name(name))
    else:
        _print_all(Console(), KINDS)
    return 0


def _print_all(console: Console, kinds: Sequence[RegistryKind]) -> None:
    table = Table("kind", "name", "what it is", "from", box=None, header_style="bold")
    for kind in kinds:
        for name, entry in sorted(registry.list_registered(kind).items()):
            package = entry.dist.name if entry.dist else "agentrl-gym"
            try:
                about = Text(_summarize(registry.load_registered(kind, name)))
            except UserError as error:  # a broken plugin is shown, and hides no other
                about = Text(f"broken: {error}", style="red")
            table.add_row(kind, name, about, package)
    if console.is_terminal:
        console.print(table)
    else:  # a line each, for grep
        for row in zip(*(column.cells for column in table.columns), strict=True):
            print_line(console, "{:<12} {:<24} {} ({})".format(*map(str, row)))
    console.print("\nagentrl list NAME shows one; agentrl train --env NAME trains on one", style="dim")
    console.print(
        f"agentrl list KIND shows the others: {', '.join(n for n in _PLURALS if _PLURALS[n] not in KINDS)}", style="dim"
    )


def _summarize(thing: object) -> str:
    if isinstance(thing, Entry):
        line = thing.explain or thing.summary
        return f"{line} ({thing.reduction})" if thing.reduction else line
    text = thing.description if isinstance(thing, Tool) else inspect.getdoc(thing) or ""
    return text.strip().splitlines()[0] if text.strip() else ""


def _describe_name(name: str) -> str:
    every = tuple(_PLURALS.values())
    kinds = [k for k in every if name in registry.list_registered(k)]
    if not kinds and ":" in name:
        thing, _ = registry.load_member("env", name)
        kinds = [_kind_of(thing)]
    if not kinds:
        known = sorted({*_PLURALS, *(n for k in every for n in registry.list_registered(k))})
        raise UserError(f"nothing is called {name!r}{suggest(name, known)}")
    return "\n\n".join(_describe(kind, name) for kind in kinds)


def _kind_of(thing: object) -> RegistryKind:
    """Return what a thing is declared as; anything else is an environment, or is refused as one."""
    return next((k for k in _PLURALS.values() if isinstance(thing, Entry) and thing.kind == k), "env")


def _describe_entry(name: str, entry: Entry) -> str:
    """Describe a loss, an advantage ...: its formula, its reduction, its metrics, its parameters."""
    doc = inspect.getdoc(entry.function) or ""
    lines = [f"{entry.kind.replace('_', ' ')} {name}: {doc.partition('Args:')[0].strip()}"]
    if entry.explain:
        lines += ["", f"explain: {entry.explain}"]
    if entry.reduction:
        lines += [f"reduction: {entry.reduction}"]
    lines += [f"metric {metric}: {m.description}" for metric, m in entry.metrics.items()]
    prefix = next((f"{c.section}.{c.arguments}." for c in CHOICES if c.kind == entry.kind), "")
    fields = [
        f"  --{prefix}{n}  {f.description or ''} [{'required' if f.is_required() else f.default}]"
        for n, f in entry.parameters.items()
    ]
    return "\n".join([*lines, *(["", "settings:"] if fields else []), *fields])


def _describe(kind: RegistryKind, name: str) -> str:
    thing, _ = registry.load_member(kind, name)
    if isinstance(thing, Entry):
        return _describe_entry(name, thing)
    prefix = {"env": "env", "tool": f"tool.{name}", "reward": f"env.reward_settings.{name}"}.get(kind)
    if prefix is not None and isinstance(thing, type):
        if kind == "env" and issubclass(thing, Env):
            return f"{_describe_class(f'env {name}', thing, prefix)}\n\n{_describe_expert(name, thing)}"
        return _describe_class(f"{kind} {name}", thing, prefix)
    if isinstance(thing, Tool):
        return f"tool {name}: {thing.description}\n{thing.parameters}"
    return f"{kind} {name}: {inspect.getdoc(thing) or ''}\n{thing() if kind == 'model' else ''}".strip()


def _describe_expert(name: str, cls: type[Env]) -> str:
    if cls.expert is Env.expert:
        return "expert: none"
    about = (inspect.getdoc(cls.expert) or "").partition("\n")[0]
    return f"expert: {about} (agentrl play --env {name} --expert)"


def _describe_class(what: str, cls: Any, prefix: str) -> str:
    """Describe an environment, a toolset or a reward, and its settings."""
    fields = build_arguments_model(cls.__init__, what).model_fields.values()
    lines = (f"  --{prefix}.{f.alias} [{'required' if f.is_required() else f.default}]" for f in fields)
    return "\n".join([f"{what}: {inspect.getdoc(cls) or ''}", *(["", "settings:"] if fields else []), *lines])


COMMAND = Command("list", "[NAME | KIND]", TEXT, _run, NoOptions, names=(0, 1))
