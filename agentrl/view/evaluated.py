"""An evaluation as the page tells of it: what it covers, and its means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.evaluation_scope import read_scope
from agentrl.view.findings import Finding


def describe_scope(folder: Path) -> str:
    """Name the tasks of an evaluation's folder; nothing for that of a training, or where it cannot be read."""
    try:
        scope = read_scope(folder)
    except UserError:
        return ""
    return "" if scope is None else f"evaluation of {scope.tasks} tasks"


def found_means(folder: Path) -> list[Finding]:
    """Tell an evaluation's mean rewards with their 95 % intervals; nothing before it has ended."""
    try:
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [_mean(how, summary[how]) for how in ("sampled", "greedy") if isinstance(summary.get(how), dict)]


def _mean(how: str, measured: dict[str, Any]) -> Finding:
    lost = f"; {measured['faults']} more were lost to faults, and are in no mean" if measured["faults"] else ""
    text = (
        f"reward, {how}: {measured['reward']:.3f} (95 % interval {measured['low']:.3f} to {measured['high']:.3f}) "
        f"over {measured['tasks']:,} tasks, {measured['episodes']:,} episodes{lost}"
    )
    return Finding("note", text)
