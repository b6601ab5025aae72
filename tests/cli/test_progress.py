"""The live table of a run, at the widths that terminals have."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from agentrl.cli.progress import LiveTable
from agentrl.library.progress import COLUMNS
from agentrl.settings.loader import build_config

VALUES = {
    "reward": 0.5,
    "tokens_per_second": 123456.0,
    "step_time": 123.4,
    "entropy": 1.23,
    "tools/call_frequency": 2.5,
}
TIMES = {"time/generate": 123.4, "time/tools": 12.9, "time/learn": 10.0, "faults/tool_timeout": 12.0}


def drawn(width: int, picture: object) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None).print(picture)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 100])
def test_the_names_and_numbers_of_a_step_are_whole(width: int) -> None:
    table = LiveTable(build_config(("test", {"env": {"name": "shop"}, "steps": 50})))
    table.on_step_end(50, VALUES | TIMES)
    head = next(line for line in drawn(width, table) if "reward" in line)
    row = next(line for line in drawn(width, table) if "123,456" in line)
    assert head.split() == COLUMNS
    assert row.split() == ["50", "0.500", "2.50", "0%", "123,456", "123.4", "123.4", "12.9", "10.0", "1.23", "12"]
