"""Panels that plugins add to the page and to the report: functions of a run's store that return plain data.

A panel is registered in the entry-point group ``agentrl.panels``, or named as ``file.py:function`` by ``--panels``. It
returns rows of a table or curves, never markup: what it says is escaped like everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import UserError, describe_raised
from agentrl.settings.registry import list_registered, load_registered
from agentrl.types import is_number
from agentrl.view.escaping import escape_html, truncate
from agentrl.view.store import Store
from agentrl.view.svg_chart import Curve, draw_curves

MOST_ROWS = 500
LONGEST = 500  # characters of a cell


@dataclass(frozen=True)
class Table:
    """A panel of rows under a head; a cell is a text, a number or None."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.head):
                raise ValueError(f"a row has {len(row)} cells under {len(self.head)} names: {list(row)!r:.80}")


@dataclass(frozen=True)
class Curves:
    """A panel of curves over steps."""

    title: str
    curves: Sequence[Curve]

    def __post_init__(self) -> None:
        for curve in self.curves:
            if len(curve.steps) != len(curve.values) or not all(map(is_number, (*curve.steps, *curve.values))):
                raise ValueError(f"curve {curve.label!r:.80} is not one finite value for each of its steps")


Panel = Callable[[Store], Table | Curves | None]


def load_panels(names: Sequence[str] = ()) -> dict[str, Panel]:
    """Load the registered panels, and those that ``names`` lists, by name.

    Raises:
        UserError: one of ``names`` cannot be loaded. A registered one that is broken says so in its place.
    """
    panels: dict[str, Panel] = {name: load_registered("panel", name) for name in names}
    return {name: _load_later(name) for name in list_registered("panel") if name not in panels} | panels


def _load_later(name: str) -> Panel:
    return lambda store: load_registered("panel", name)(store)


def compute_panel(name: str, panel: Panel, store: Store) -> Table | Curves | None:
    """Compute a panel; a table that says why, if its code raises or returns something else."""
    try:
        shown = panel(store)
        if not isinstance(shown, Table | Curves | None):
            raise TypeError(f"it returned a {type(shown).__name__}, and not a Table, Curves or None")
    except (Exception, SystemExit) as error:  # a plugin's own code
        why = str(error) if isinstance(error, UserError) else describe_raised(error)
        return Table(f"panel {name}", ["it could not be made"], [[why]])
    return shown


def to_json(panel: Table | Curves) -> dict[str, Any]:
    """Convert a panel for the page: its texts, cut to a length, and its numbers."""
    if isinstance(panel, Table):
        rows = [[_show(cell) for cell in row] for row in panel.rows[:MOST_ROWS]]
        return {"title": panel.title, "head": list(panel.head), "rows": rows, "more": len(panel.rows) - len(rows)}
    curves = [
        {"label": c.label, "xs": list(map(float, c.steps)), "ys": list(map(float, c.values))} for c in panel.curves
    ]
    return {"title": panel.title, "curves": curves}


def render_panel(panel: Table | Curves) -> str:
    """Render a panel for the report."""
    if isinstance(panel, Curves):
        return f"<div class=plots>{draw_curves(panel.title, panel.curves)}</div>"
    head = "".join(f"<th>{escape_html(name)}</th>" for name in panel.head)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape_html(_show(cell))}</td>' for cell in row)}</tr>" for row in panel.rows[:MOST_ROWS]
    )
    title = escape_html(panel.title)
    return f"<h3>{title}</h3><div class=wide><table><tr>{head}</tr>{rows}</table></div>"


def _show(cell: object) -> str:
    if cell is None:
        return ""
    return f"{cell:,.4g}" if isinstance(cell, float) else truncate(str(cell), LONGEST)
