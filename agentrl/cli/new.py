"""``agentrl new``: a package of your own."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from agentrl import templates
from agentrl.cli.arguments import Arguments, Command
from agentrl.errors import suggest
from agentrl.settings.section import Section
from agentrl.templates import TemplateKind

TEXT = """\
  agentrl new env crates        writes agentrl-crates/: a small environment with a tool of its own, tests, a README
  agentrl new tool weather-report

The package installs, registers under NAME, passes its tests and `agentrl check`. Then change it.
"""
KINDS: dict[str, TemplateKind] = {"env": "env", "tool": "tool"}


class _NewOptions(Section):
    out: Path | None = Field(None, description="the folder; agentrl-NAME by default")


def _run(arguments: Arguments[_NewOptions]) -> int:
    kind, name = arguments.names
    if kind not in KINDS:
        raise COMMAND.refuse(arguments.names, suggest(kind, KINDS))
    folder = templates.write_package(KINDS[kind], name, arguments.options.out)
    steps = (f"pip install -e '{folder}[test]'", f"agentrl check {kind} {name}", f"pytest {folder}")
    print(f"{folder} is there. Then:\n\n  " + "\n  ".join(steps))
    return 0


COMMAND = Command("new", "{env,tool} NAME [--out DIR]", TEXT, _run, _NewOptions, names=(2, 2))
