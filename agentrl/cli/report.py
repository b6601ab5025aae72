"""``agentrl report``."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field

from agentrl.cli.arguments import Arguments, Command
from agentrl.errors import ConfigError, UserError
from agentrl.settings.schema import CommaSeparated, Section
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
    from agentrl.view.report import GENERATOR, render_report
    from agentrl.view.store import open_runs

    panels = load_panels(arguments.options.panels)
    stores = open_runs(arguments.names)
    if len(stores) != 1:
        raise ConfigError(f"agentrl report takes one run, and {arguments.names[0]!r} holds {len(stores)}")
    out = arguments.options.out or stores[0].folder / "report.html"
    _check_ours(out, GENERATOR)
    stores[0].refresh()
    try:
        out.write_text(render_report(stores[0], panels), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {str(out)!r}: {error.strerror}; give another --out") from None
    print(f"{out}: {out.stat().st_size / 1e3:,.0f} kB")
    for sentence in stores[0].damage():
        print(escape_controls(f"not in it: {sentence}"), file=sys.stderr)
    return 0


def _check_ours(out: Path, mark: str) -> None:
    """Raise UserError if the file exists and is no report."""
    try:
        with out.open("rb") as file:  # a device may have no end
            begin = file.read(500).decode("utf-8", "replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot write {str(out)!r}: {error.strerror}; give another --out") from None
    if mark not in begin:
        raise UserError(f"{str(out)!r} exists and is no report of ours; give another --out")


COMMAND = Command("report", "RUN [--out FILE] [--panels NAME,NAME]", TEXT, _run, _ReportOptions, names=(1, 1))
