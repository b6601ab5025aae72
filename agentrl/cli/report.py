"""``agentrl report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from agentrl.cli.words import flags_told, split
from agentrl.config import Section
from agentrl.errors import ConfigError, UserError

HELP = """usage: agentrl report RUN [--out FILE]

  agentrl report runs/last --out shop.html

Writes a run as one HTML file that needs nothing else: what stands out, curves, and the best, the worst and the most
telling conversations.
"""


class Settings(Section):
    out: Path | None = Field(None, description="the file; RUN/report.html by default")


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(HELP + "\n" + flags_told(Settings))
        return 0
    names, settings = split(words, Settings, "RUN [--out FILE]")
    from agentrl.view.report import GENERATOR, report
    from agentrl.view.store import open_runs

    stores = open_runs(names)
    if len(stores) != 1:
        raise ConfigError(f"agentrl report takes one run, and {' '.join(names)!r} holds {len(stores)}")
    out = settings.out or stores[0].folder / "report.html"
    _check_ours(out, GENERATOR)
    stores[0].refresh()
    try:
        out.write_text(report(stores[0]), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {str(out)!r}: {error.strerror}; give another --out") from None
    print(f"{out}: {out.stat().st_size / 1e3:,.0f} kB")
    return 0


def _check_ours(out: Path, mark: str) -> None:
    """Raises UserError where the file exists and is no report."""
    try:
        begin = out.read_bytes()[:500].decode("utf-8", "replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot write {str(out)!r}: {error.strerror}; give another --out") from None
    if mark not in begin:
        raise UserError(f"{str(out)!r} exists and is no report of ours; give another --out")
