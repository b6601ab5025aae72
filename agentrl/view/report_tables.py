"""The tables of a report: settings that are not the default, and held-out tasks that changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.view.escaping import escape_html, truncate
from agentrl.view.run_cache import RunCache
from agentrl.view.settings_table import compare_settings
from agentrl.view.store import Store

TASKS = 12  # that changed, of each verdict
LONGEST = 200  # characters of a cell


def format_settings(store: Store) -> str:
    """Render the settings that are not the default, and the environment's own, as a table."""
    rows = [
        f"<tr><td><code>{_cell(row.name)}</code></td><td>{_cell(row.values[0] or '')}</td>"
        f"<td class=dim>{_cell(row.default or '')}</td></tr>"
        for row in compare_settings([store])
        if row.shown
    ]
    return _table("Settings", "", ("setting", "value", "default"), rows)


def format_held_out(run: RunCache) -> str:
    """Render the held-out tasks that were fixed or broke as a table; empty if none was evaluated twice."""
    pairs = run.held_out()
    if pairs is None or not pairs["tasks"]:
        return ""
    rows = [_row(task) for verdict in ("fixed", "broke") for task in _select(pairs, verdict)]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in pairs["counts"].items())
    note = f"<p>Of {sum(pairs['counts'].values())} tasks {counts}. {_describe_change(pairs['difference'])}</p>"
    title = f"Held-out tasks, step {pairs['before']} and step {pairs['after']}"
    return _table(title, note, ("", "task", "expected", "before", "after"), rows)


def _select(pairs: Mapping[str, Any], verdict: str) -> list[Mapping[str, Any]]:
    return [task for task in pairs["tasks"] if task["verdict"] == verdict][:TASKS]


def _describe_change(difference: Mapping[str, float] | None) -> str:
    if difference is None:
        return ""
    mean, low, high = difference["mean"], difference["low"], difference["high"]
    verdict = "it is better" if low > 0 else "it is worse" if high < 0 else "no clear difference"
    return f"The mean reward changed by {mean:+.3f} (95 % interval {low:+.3f} to {high:+.3f}): {verdict}."


def _row(task: Mapping[str, Any]) -> str:
    question = task["question"] or f"task {task['task']}"
    sides = "".join(f"<td>{_cell(task[side]['answer'] or '')}</td>" for side in ("before", "after"))
    kind = {"fixed": "good", "broke": "bad"}[task["verdict"]]
    expected = _cell(task["expected"] or "")
    return f"<tr><td class={kind}>{task['verdict']}</td><td>{_cell(question)}</td><td>{expected}</td>{sides}</tr>"


def _table(title: str, note: str, head: tuple[str, ...], rows: list[str]) -> str:
    if not rows and not note:
        return ""
    names = "".join(f"<th>{name}</th>" for name in head)
    table = f"<div class=wide><table><tr>{names}</tr>{''.join(rows)}</table></div>" if rows else ""
    return f"<h2>{title}</h2>{note}{table}"


def _cell(text: str) -> str:
    return escape_html(truncate(text, LONGEST))
