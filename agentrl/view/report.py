"""A run as one HTML file: no scripts, nothing from elsewhere, everything that others wrote escaped."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.stored import place
from agentrl.view import episode
from agentrl.view.explain import group_of, where_from, why_not_trained
from agentrl.view.findings import Finding, recent_from
from agentrl.view.lanes_svg import draw_lanes
from agentrl.view.look import Look
from agentrl.view.plots import Line, plot
from agentrl.view.report_tables import format_held_out, format_settings
from agentrl.view.store import Store
from agentrl.view.telling import chosen
from agentrl.view.text import cut, visible
from agentrl.view.timelines import Timelines
from agentrl.view.trend import trend

GENERATOR = '<meta name="generator" content="agentrl report">'
STYLE = Path(__file__).with_name("report.css")
LONGEST = 4_000  # characters of a message
MESSAGES = 40
PLOTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward", "eval/reward", "eval/greedy_reward")),
    ("how episodes end (shares)", ("stops/",)),
    ("calls refused (share)", ("tools/failure_frequency",)),
    ("calls an episode", ("tools/call_frequency",)),
    ("groups that teach nothing (share)", ("frac_reward_zero_std",)),
    ("faults (episodes)", ("faults/",)),
    ("entropy", ("entropy",)),
    ("kl", ("kl",)),
    ("tokens an episode", ("completions/mean_length",)),
    ("seconds of a step", ("step_time", "time/generate", "time/tools", "time/learn", "time/idle")),
)


def report(store: Store) -> str:
    """The whole page.

    Raises:
        UserError: the run has no step yet.
    """
    if not store.curves.lines:
        raise UserError(f"{str(store.folder)!r} has no step yet: there is nothing to report")
    look = Look(store)
    found = look.found()
    steps, rewards = store.curves.series("reward")
    first = recent_from(steps, trend(steps, rewards))
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            GENERATOR,
            "<meta http-equiv=\"content-security-policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_words(store.name)}</title><style>{STYLE.read_text(encoding='utf-8')}</style></head><body>",
            f"<h1>{_words(store.name)}</h1>{_facts(store)}",
            f"<h2>What stands out</h2><ul class=found>{''.join(_finding(f) for f in found)}</ul>",
            f"<h2>Curves</h2><div class=plots>{''.join(_plots(store))}</div>",
            format_held_out(look),
            *_timelines(store),
            "<h2>Conversations</h2>",
            *(_conversations(look, c.title, c.rows) for c in chosen(store.now.table, first, found)),
            format_settings(store),
            "</body></html>\n",
        ]
    )


def _timelines(store: Store) -> list[str]:
    """Draw who was busy when in a usual step and in the slowest."""
    timelines = Timelines(store.folder / "timeline.jsonl")
    timelines.refresh()
    drawn = set(timelines.steps())
    steps, seconds = store.curves.series("step_time")
    known = sorted((s, step) for step, s in zip(steps, seconds, strict=True) if step in drawn)
    if not known:
        return []
    chosen = {"a usual step": known[len(known) // 2][1], "the slowest step": known[-1][1]}
    figures = [
        draw_lanes(f"{words}, {step}: {picture['seconds']:.2f} s", picture)
        for words, step in {step: (words, step) for words, step in chosen.items()}.values()
        for picture in timelines.pictures(step)
        if picture["kind"] == "step"
    ]
    note = (
        "<p class=dim>Lanes overlap: tools run while the model writes. At each moment a step waits for one thing.</p>"
    )
    return [f"<h2>Where the time goes</h2>{note}<div class=plots>{''.join(figures)}</div>"]


def _facts(store: Store) -> str:
    facts = {
        "environment": store.setting("env.name"),
        "model": store.setting("model"),
        "seed": store.setting("seed"),
        "steps": len(store.curves.series("reward")[0]),
        "episodes": f"{store.now.table.num_rows:,}",
        "advantage": store.setting("learner.advantage"),
        "learning rate": store.setting("learner.lr"),
        **_summary(store),
    }
    cells = (f"<dt>{k}</dt><dd>{_words(str(v))}</dd>" for k, v in facts.items() if v is not None)
    return f"<dl class=facts>{''.join(cells)}</dl>"


def _summary(store: Store) -> dict[str, str]:
    try:
        found = json.loads((store.folder / "summary.json").read_text(encoding="utf-8"))
        return {"held-out reward": f"{found['reward_before']:.3f} before, {found['reward_after']:.3f} after"}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _finding(found: Finding) -> str:
    return f"<li class={found.kind}>{_words(found.text)}</li>"


def _plots(store: Store) -> list[str]:
    names = store.curves.names()
    found = []
    for title, wanted in PLOTS:
        own = [n for w in wanted for n in names if n == w or (w.endswith("/") and n.startswith(w))]
        lines = [Line(_short(n), *store.curves.series(n), dots=n.startswith("eval/")) for n in own]
        found.append(plot(title, lines))
    return found


def _short(name: str) -> str:
    """A curve's name within its figure."""
    known = {"eval/reward": "held out", "eval/greedy_reward": "held out, greedy"}
    return known.get(name) or name.removeprefix("stops/").removeprefix("faults/").removeprefix("time/")


def _conversations(look: Look, title: str, rows: list[int]) -> str:
    told = "".join(_conversation(look, look.store.now.table, row) for row in rows)
    return f"<section><h3>{_words(title)}</h3><div class=pair>{told}</div></section>"


def _conversation(look: Look, table: Any, at: int) -> str:
    store = look.store
    split, step, number = (table[n][at].as_py() for n in ("split", "step", "row"))
    name = f"{split}-{step}:{number}"
    try:
        row = episode.read(store, place(name))
    except UserError as error:
        return f"<p>{_words(str(error))}</p>"
    group = group_of(store, place(name))
    why = why_not_trained(store, row, group) or where_from(store, row, group)
    ended = f"{row['fault']}: {row['fault_message']}" if row["fault"] else row["stop"]
    reward = "none" if row["reward"] is None else f"{row['reward']:.3g}"
    said = episode.told(row, look.texts)
    expected = episode.known(row)["expected"]
    right = f" Expected: <b>{_words(cut(expected, 400))}</b>." if expected else ""
    more = f"<p>{len(said) - MESSAGES} more messages</p>" if len(said) > MESSAGES else ""
    return (
        f"<article><h4>{_words(name)}: reward {reward}</h4><p class=dim>ended: {_words(cut(str(ended), 400))}.{right} "
        f"{_words(why)}</p>{''.join(_message(m) for m in said[:MESSAGES])}{more}</article>"
    )


def _message(message: dict[str, Any]) -> str:
    by = {"assistant": "model", "tool": "world"}.get(message["role"], "prompt")
    calls = "".join(
        f"<div class=call>&rarr; <b>{_words(c['name'] or '(unreadable)')}</b> {_asked(c)}{_status(c)}</div>"
        for c in message.get("calls", [])
    )
    name = f" {_words(message['name'])}" if message["name"] else ""
    text = f"<div class=text>{_text(message)}</div>" if message["length"] else ""
    return f"<div class='message {by}'><b>{_words(message['role'])}</b>{name}{_status(message)}{text}{calls}</div>"


def _asked(call: dict[str, Any]) -> str:
    """The arguments; of a call that could not be read what the model wrote, and why not."""
    if "why" not in call:
        return _text(call["arguments"])
    return f"<bdi>{_words(call.get('raw', ''))}</bdi> <span class=bad>{_words(call['why'])}</span>"


def _status(record: dict[str, Any]) -> str:
    if "status" not in record:
        return ""
    bad = "" if record["status"] == "ok" else " bad"
    return f"<span class='status{bad}'>{_words(record['status'])} {record['seconds']:.3f} s</span>"


def _text(piece: dict[str, Any]) -> str:
    left = piece["length"] - min(len(piece["text"]), LONGEST)
    more = f"<i> ... {left:,} more characters</i>" if left else ""
    return f"<bdi>{_words(piece['text'][:LONGEST])}</bdi>{more}"


def _words(text: str) -> str:
    return escape(visible(text))
