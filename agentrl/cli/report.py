"""``agentrl report``."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field

from agentrl.cli.arguments import Arguments, Command
from agentrl.errors import ConfigError
from agentrl.settings.section import Section
from agentrl.settings.values import CommaSeparated
from agentrl.view.escaping import escape_controls

TEXT = """\
  agentrl report runs/last --out shop.html

Writes a run as one HTML file that needs nothing else: what stands out, curves, and the best, the worst and the most
telling conversations.
"""


class _ReportOptions(Section):
    out: Path | None = Field(None, description="the file; RUN/report.html by default")
    panels: CommaSeparated = Field((), description="plugins' panels beside the registered ones: file.py:function")


def _run(arguments: Arguments[_ReportOptions]) -> int:
    from agentrl.view.panels import load_panels
    from agentrl.view.report import write_report
    from agentrl.view.store import open_runs

    panels = load_panels(arguments.options.panels)
    stores = open_runs(arguments.names)
    if len(stores) != 1:
        raise ConfigError(f"agentrl report takes one run, and {arguments.names[0]!r} holds {len(stores)}")
    out = arguments.options.out or stores[0].folder / "report.html"
    stores[0].refresh()
    write_report(stores[0], out, panels)
    print(f"{out}: {out.stat().st_size / 1e3:,.0f} kB")
    for sentence in stores[0].damage():
        print(escape_controls(f"not in it: {sentence}"), file=sys.stderr)
    return 0


COMMAND = Command("report", "RUN [--out FILE] [--panels NAME,NAME]", TEXT, _run, _ReportOptions, names=(1, 1))
