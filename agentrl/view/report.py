"""A report of a run as one HTML file: no scripts, no other files, and everything that others wrote escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from agentrl.errors import UserError
from agentrl.evaluation.scope import EvaluationScope
from agentrl.runs.reader import EpisodeId
from agentrl.settings.documents import read_json
from agentrl.view import episode
from agentrl.view.escaping import escape_html, truncate
from agentrl.view.evaluation_findings import describe_scope, find_scope
from agentrl.view.explain import explain_advantage, explain_exclusion, find_group
from agentrl.view.findings import RunFinding
from agentrl.view.highlights import select_highlights
from agentrl.view.panels import Panel, compute_panel, render_panel
from agentrl.view.report_tables import format_held_out, format_settings
from agentrl.view.run_cache import RunCache
from agentrl.view.store import Store
from agentrl.view.svg_chart import Curve, draw_curves, draw_lanes
from agentrl.view.timelines import Timelines

GENERATOR = '<meta name="generator" content="agentrl report">'
STYLE = Path(__file__).with_name("report.css")
LONGEST = 4_000  # characters of a message
_THOUGHT = re.compile(r"(<think>.*?(?:</think>|\Z))", re.S)
MESSAGES = 40
PLOTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward", "eval/reward", "eval/greedy_reward")),
    ("how episodes end (shares)", ("stops/",)),
    ("failed calls (share)", ("tools/failure_frequency",)),
    ("calls an episode", ("tools/call_frequency",)),
    ("zero-variance groups (share)", ("frac_reward_zero_std",)),
    ("faults (episodes)", ("faults/",)),
    ("entropy", ("entropy",)),
    ("kl", ("kl",)),
    ("tokens an episode", ("completions/mean_length",)),
    ("seconds of a step", ("step_time", "time/generate", "time/tools", "time/learn", "time/idle")),
)


def render_report(store: Store, panels: Mapping[str, Panel] | None = None) -> str:
    """Render the page, with what plugins add to it.

    Raises:
        UserError: the run has no step yet.
    """
    if not store.metrics.lines and not store.now.table.num_rows:
        raise UserError(f"{str(store.folder)!r} has no step yet: there is nothing to report")
    run = RunCache(store)
    computed = [compute_panel(name, panel, store) for name, panel in (panels or {}).items()]
    findings = run.findings()
    scope = find_scope(store.folder)
    highlights = select_highlights(store.now.table, run.first_step(), findings, scope.split if scope else "train")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            GENERATOR,
            "<meta http-equiv=\"content-security-policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape_html(store.name)}</title><style>{STYLE.read_text(encoding='utf-8')}</style></head><body>",
            f"<h1>{escape_html(store.name)}</h1>{_facts(store, scope)}",
            f"<h2>What stands out</h2><ul class=found>{''.join(_finding(f) for f in findings)}</ul>",
            *([] if scope else _curves(store)),
            format_held_out(run),
            *_timelines(store),
            *(render_panel(shown) for shown in computed if shown is not None),
            "<h2>Conversations</h2>" if highlights else "",
            *(_conversations(run, h.title, h.rows) for h in highlights),
            format_settings(store),
            "</body></html>\n",
        ]
    )


def write_report(store: Store, out: Path, panels: Mapping[str, Panel] | None = None) -> Path:
    """Write the page to a file, and return its path.

    Raises:
        UserError: the run has no step yet, the file cannot be written, or is there and is no report.
    """
    _check_ours(out)
    page = render_report(store, panels)
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {str(out)!r}: {error.strerror}; give another --out") from None
    return out


def _check_ours(out: Path) -> None:
    """Raise UserError if the file exists and is no report."""
    try:
        with out.open("rb") as file:  # a device may have no end
            begin = file.read(500).decode("utf-8", "replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot write {str(out)!r}: {error.strerror}; give another --out") from None
    if GENERATOR not in begin:
        raise UserError(f"{str(out)!r} exists and is no report of ours; give another --out")


def _timelines(store: Store) -> list[str]:
    """Draw the lanes of a usual step and of the slowest."""
    timelines = Timelines(store.folder / "timeline.jsonl")
    timelines.refresh()
    drawn = set(timelines.steps())
    steps, seconds = store.metrics.series("step_time")
    known = sorted((s, step) for step, s in zip(steps, seconds, strict=True) if step in drawn)
    if not known:
        return []
    steps_shown = {"a usual step": known[len(known) // 2][1], "the slowest step": known[-1][1]}
    figures = [
        draw_lanes(f"{words}, {step}: {picture['seconds']:.2f} s", picture)
        for words, step in {step: (words, step) for words, step in steps_shown.items()}.values()
        for picture in timelines.pictures(step)
        if picture["kind"] == "step"
    ]
    note = (
        "<p class=dim>Lanes overlap: tools run while the model writes. At each moment a step waits for one thing.</p>"
    )
    return [f"<h2>Where the time goes</h2>{note}<div class=plots>{''.join(figures)}</div>"]


def _curves(store: Store) -> list[str]:
    figures = "".join(_plots(store))
    return [f"<h2>Curves</h2><div class=plots>{figures}</div>"] if figures else []


def _facts(store: Store, scope: EvaluationScope | None) -> str:
    facts = {
        "environment": store.setting("env.name"),
        "model": store.setting("model"),
        "seed": store.setting("seed"),
        **(_trained(store) if scope is None else {"what": describe_scope(store.folder), "split": scope.split}),
        "episodes": f"{store.now.table.num_rows:,}",
    }
    cells = (f"<dt>{k}</dt><dd>{escape_html(str(v))}</dd>" for k, v in facts.items() if v is not None)
    return f"<dl class=facts>{''.join(cells)}</dl>"


def _trained(store: Store) -> dict[str, Any]:
    return {
        "steps": len(store.metrics.series("reward")[0]),
        "advantage": store.setting("learner.advantage"),
        "learning rate": store.setting("learner.lr"),
        **_summary(store),
    }


def _summary(store: Store) -> dict[str, str]:
    try:
        summary = read_json(store.folder / "summary.json")
        return {"held-out reward": f"{summary['reward_before']:.3f} before, {summary['reward_after']:.3f} after"}
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return {}


def _finding(finding: RunFinding) -> str:
    return f"<li class={finding.kind}>{escape_html(finding.text)}</li>"


def _plots(store: Store) -> list[str]:
    names = store.metrics.names()
    figures = []
    for title, patterns in PLOTS:
        own = [n for p in patterns for n in names if n == p or (p.endswith("/") and n.startswith(p))]
        lines = [Curve(_short(n), *store.metrics.series(n), dots=n.startswith("eval/")) for n in own]
        figures.append(draw_curves(title, lines))
    return figures


def _short(name: str) -> str:
    """Return a curve's name within its figure."""
    known = {"eval/reward": "held out", "eval/greedy_reward": "held out, greedy"}
    return known.get(name) or name.removeprefix("stops/").removeprefix("faults/").removeprefix("time/")


def _conversations(run: RunCache, title: str, rows: list[int]) -> str:
    articles = "".join(_conversation(run, run.store.now.table, row) for row in rows)
    return f"<section><h3>{escape_html(title)}</h3><div class=pair>{articles}</div></section>"


def _conversation(run: RunCache, table: pa.Table, at: int) -> str:
    store = run.store
    split, step, number = (table[n][at].as_py() for n in ("split", "step", "row"))
    name = EpisodeId(split, step, number)
    try:
        row = episode.read_episode(store, name)
    except UserError as error:
        return f"<p>{escape_html(str(error))}</p>"
    group = find_group(store, name)
    why = explain_exclusion(store, row, group) or explain_advantage(store, row, group)
    ended = f"{row['fault']}: {row['fault_message']}" if row["fault"] else row["stop"]
    reward = "none" if row["reward"] is None else f"{row['reward']:.3g}"
    messages = episode.describe_messages(row, run.texts)
    expected = episode.describe_info(row)["expected"]
    right = f" Expected: <b>{escape_html(truncate(expected, 400))}</b>." if expected else ""
    more = f"<p>{len(messages) - MESSAGES} more messages</p>" if len(messages) > MESSAGES else ""
    ended = escape_html(truncate(str(ended), 400))
    return (
        f"<article><h4>{escape_html(str(name))}: reward {reward}</h4><p class=dim>ended: {ended}.{right} "
        f"{escape_html(why)}</p>{''.join(_message(m) for m in messages[:MESSAGES])}{more}</article>"
    )


def _message(message: dict[str, Any]) -> str:
    by = {"assistant": "model", "tool": "env"}.get(message["role"], "prompt")
    calls = "".join(
        f"<div class=call>&rarr; <b>{escape_html(c['name'] or '(unreadable)')}</b> {_arguments(c)}{_status(c)}</div>"
        for c in message.get("calls", [])
    )
    name = f" {escape_html(message['name'])}" if message["name"] else ""
    show = _show_said if by == "model" else escape_html
    text = f"<div class=text>{_text(message, show)}</div>" if message["length"] else ""
    return f"<div class='message {by}'><b>{escape_html(message['role'])}</b>{name}{_status(message)}{text}{calls}</div>"


def _arguments(call: dict[str, Any]) -> str:
    """Render the arguments; of a call that could not be read, the text that the model wrote, and the reason."""
    if "why" not in call:
        return _text(call["arguments"])
    return f"<bdi>{escape_html(call.get('raw', ''))}</bdi> <span class=bad>{escape_html(call['why'])}</span>"


def _status(record: dict[str, Any]) -> str:
    if "status" not in record:
        return ""
    bad = "" if record["status"] == "ok" else " bad"
    return f"<span class='status{bad}'>{escape_html(record['status'])} {record['seconds']:.3f} s</span>"


def _text(piece: dict[str, Any], show: Callable[[str], str] = escape_html) -> str:
    left = piece["length"] - min(len(piece["text"]), LONGEST)
    more = f"<i> ... {left:,} more characters</i>" if left else ""
    return f"<bdi>{show(piece['text'][:LONGEST])}</bdi>{more}"


def _show_said(text: str) -> str:
    """Render what a model said, its thoughts paler."""
    parts = _THOUGHT.split(text)  # every second one is a thought
    return "".join(f"<i class=dim>{escape_html(p)}</i>" if i % 2 else escape_html(p) for i, p in enumerate(parts))
