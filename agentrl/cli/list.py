"""``agentrl list``: what is registered, here and by plugins; ``agentrl list NAME``: one of them."""

from __future__ import annotations

import inspect
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl.cli.arguments import Arguments, Command, NoOptions
from agentrl.errors import UserError, suggest
from agentrl.settings import registry
from agentrl.settings.registry import RegistryKind
from agentrl.settings.signature import build_arguments_model
from agentrl.tools.tool import Tool

TEXT = """\
Without a name: the environments, tools, rewards and models. With one: what it is, and its settings.
"""
KINDS: tuple[RegistryKind, ...] = ("env", "tool", "reward", "model")


def _run(arguments: Arguments[NoOptions]) -> int:
    if arguments.names:
        print(_describe_name(arguments.names[0]))
    else:
        _print_all(Console())
    return 0


def _print_all(console: Console) -> None:
    table = Table("kind", "name", "what it is", "from", box=None, header_style="bold")
    for kind in KINDS:
        for name, entry in sorted(registry.list_registered(kind).items()):
            package = entry.dist.name if entry.dist else ""
            try:
                about = _summarize(registry.load_registered(kind, name))
            except UserError as error:  # a broken plugin is shown, and hides no other
                about = f"[red]broken: {error}[/red]"
            table.add_row(kind, name, about, package)
    console.print(table)
    console.print("\nagentrl list NAME shows one; agentrl train --env NAME trains on one", style="dim")


def _summarize(thing: object) -> str:
    text = thing.description if isinstance(thing, Tool) else inspect.getdoc(thing) or ""
    return text.strip().splitlines()[0] if text.strip() else ""


def _describe_name(name: str) -> str:
    kinds = [k for k in KINDS if name in registry.list_registered(k)]
    if not kinds and ":" in name:
        kinds = ["env"]
    if not kinds:
        known = [n for k in KINDS for n in registry.list_registered(k)]
        raise UserError(f"nothing is called {name!r}{suggest(name, known)}")
    return "\n\n".join(_describe(kind, name) for kind in kinds)


def _describe(kind: RegistryKind, name: str) -> str:
    thing, _ = registry.load_member(kind, name)
    prefix = {"env": "env", "tool": f"tool.{name}", "reward": f"env.reward_settings.{name}"}.get(kind)
    if prefix is not None and isinstance(thing, type):
        return _describe_class(f"{kind} {name}", thing, prefix)
    if isinstance(thing, Tool):
        return f"tool {name}: {thing.description}\n{thing.parameters}"
    return f"{kind} {name}: {inspect.getdoc(thing) or ''}\n{thing() if kind == 'model' else ''}".strip()


def _describe_class(what: str, cls: Any, prefix: str) -> str:
    """Describe an environment, a toolset or a reward, and its settings."""
    fields = build_arguments_model(cls.__init__, what).model_fields.values()
    lines = (f"  --{prefix}.{f.alias} [{'required' if f.is_required() else f.default}]" for f in fields)
    return "\n".join([f"{what}: {inspect.getdoc(cls) or ''}", *(["", "settings:"] if fields else []), *lines])


COMMAND = Command("list", "[NAME]", TEXT, _run, NoOptions, names=(0, 1))
