"""``agentrl list``: what is registered, here and by plugins; ``agentrl list NAME``: one of them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from agentrl import registry
from agentrl.cli import settings
from agentrl.errors import UserError, nearest
from agentrl.registry import Kind
from agentrl.tool import Tool

HELP = """usage: agentrl list [NAME]

Without a name: the environments, tools and models. With one: what it is, and its settings.
"""
KINDS: tuple[Kind, ...] = ("env", "tool", "reward", "model")


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(HELP)
    elif words:
        print(_one(words[0]))
    else:
        _all(Console())
    return 0


def _all(console: Console) -> None:
    table = Table("kind", "name", "what it is", "from", box=None, header_style="bold")
    for kind in KINDS:
        for name, entry in sorted(registry.available(kind).items()):
            package = entry.dist.name if entry.dist else ""
            try:
                about = _about(registry.load(kind, name))
            except UserError as error:  # a broken plugin is shown, and hides no other
                about = f"[red]broken: {error}[/red]"
            table.add_row(kind, name, about, package)
    console.print(table)
    console.print("\nagentrl list NAME shows one; agentrl train --env NAME trains on one", style="dim")


def _about(found: object) -> str:
    text = found.description if isinstance(found, Tool) else inspect.getdoc(found) or ""
    return text.strip().splitlines()[0] if text.strip() else ""


def _one(name: str) -> str:
    kinds = [k for k in KINDS if name in registry.available(k)]
    if not kinds and ":" in name:
        kinds = ["env"]
    if not kinds:
        known = [n for k in KINDS for n in registry.available(k)]
        raise UserError(f"nothing is called {name!r}{nearest(name, known)}")
    return "\n\n".join(_described(kind, name) for kind in kinds)


def _described(kind: Kind, name: str) -> str:
    found, _ = registry.member(kind, name)
    prefix = {"env": "env", "tool": f"tool.{name}", "reward": f"env.reward_settings.{name}"}.get(kind)
    if prefix is not None and isinstance(found, type):
        return settings.of_class(f"{kind} {name}", found, prefix)
    if isinstance(found, Tool):
        return f"tool {name}: {found.description}\n{found.parameters}"
    return f"{kind} {name}: {inspect.getdoc(found) or ''}\n{found() if kind == 'model' else ''}".strip()
