"""The end of a run: before and after, in numbers and in one conversation."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from agentrl.cli.output import Console
from agentrl.errors import UserError
from agentrl.evaluation.statistics import Estimate
from agentrl.library.figures import format_difference, format_mean, format_share
from agentrl.runs.folder import spell_resume
from agentrl.runs.reader import parse_episode_id
from agentrl.runtime.interruption import WORDS
from agentrl.types import Message
from agentrl.view import episode
from agentrl.view.escaping import escape_controls
from agentrl.view.store import Store
from agentrl.view.tokens import TokenTexts

STYLES = {"system": "dim", "user": "", "assistant": "cyan", "tool": "magenta"}


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    if summary["interrupted"]:
        by = WORDS[signal.Signals[summary["signal"]]]
        console.print(f"stopped by {by} after {summary['steps']} steps", highlight=False)
        _where(console, summary)
        return
    before, after = summary["before"], summary["after"]
    table = Table(f"held-out {summary['env']}", "before", "after", box=None, header_style="bold")
    for how in before:
        table.add_row(f"reward, {how}", *(_mean(measured[how]) for measured in (before, after)))
    calls = (f"{measured['sampled']['calls']:.2f}" for measured in (before, after))
    table.add_row("tool calls an episode", *calls)
    table.add_row("failed calls", *(format_share(measured["sampled"]["failed_calls"]) for measured in (before, after)))
    for name, own in summary["sets"].items():
        sides = (own["before"], own["after"])
        for how in own["after"] or own["before"]:
            table.add_row(f"{name}: reward, {how}", *(_mean(side[how]) if side else "-" for side in sides))
    console.print()
    console.print(table)
    console.print(f"\n{_difference(summary['difference'])}", highlight=False, soft_wrap=not console.is_terminal)
    sampled = f", {summary['sampled_tokens']:,} tokens sampled" if summary["sampled_tokens"] else ""
    console.print(
        f"\n{summary['steps']} step{'s' if summary['steps'] != 1 else ''}, "
        f"{summary['train_seconds']:.0f} s of training, {summary['cpu_seconds']:.0f} CPU-seconds{sampled}",
        highlight=False,
    )
    for title in ("before", "after"):
        messages, name = summary[f"conversation_{title}"], summary.get(f"episode_{title}")
        raw = _read_raw_calls(summary["run_dir"], name) if name and _has_unread(messages) else []
        _conversation(console, f"one conversation {title}", messages, raw)
    prompts = summary["prompts"]
    if prompts["also_trained"] and prompts["held_out"] > 1:
        console.print(f"\n{prompts['also_trained']} of {prompts['held_out']} held-out prompts were trained on too")
    faults = dict(summary["faults"])
    if provoked := faults.pop("provoked", 0):
        console.print(f"\n{provoked} episodes provoked an infrastructure error themselves, which earns nothing")
    if faults:
        console.print("\ninfrastructure errors, not trained: " + ", ".join(f"{k} {n}" for k, n in faults.items()))
    _where(console, summary)


def _where(console: Console, summary: dict[str, Any]) -> None:
    """Print where the results are, and the commands that go on from here."""
    run, cut = summary["run_dir"], summary["interrupted"]
    lines = {"model": summary["model_dir"], "metrics": summary["metrics"], "look": f"agentrl view {run}"}
    if not cut:
        lines["evaluate"] = f"agentrl eval --env {summary['env']} --model {run}"
    elif summary["checkpoint"] is not None:
        lines["resume"] = spell_resume(run)
        lines["resume"] += (
            "" if summary["checkpoint"] == summary["steps"] else f"  (after step {summary['checkpoint']})"
        )
    else:
        lines["resume"] = f"cannot be: no checkpoint was written; --model {run} begins anew from the model"
    text = "\n".join(f"{name:<8} {value}" for name, value in lines.items())
    console.print("\n" + text, highlight=False, soft_wrap=True)


def _mean(measured: dict[str, Any]) -> Text:
    mean = Estimate(measured["reward"], *(measured[name] for name in ("low", "high", "stderr", "tasks")))
    return Text(format_mean(mean))


def _difference(differences: dict[str, dict[str, Any] | None]) -> str:
    """Say what the training changed, and where that is no more than chance, or is not known."""
    estimates = {how: Estimate(**difference) for how, difference in differences.items() if difference is not None}
    lost = [how for how in differences if how not in estimates]
    untold = f"{' and '.join(lost)}: no task was scored both before and after" if lost else ""
    if not estimates:
        return f"change {untold}"
    tasks = " and ".join(str(n) for n in dict.fromkeys(d.tasks for d in estimates.values()))
    changes = ", ".join(f"{how} {format_difference(d)}" for how, d in estimates.items())
    unclear = [how for how, d in estimates.items() if not d.excludes_zero]
    winner = f"; no clear winner: {' and '.join(unclear)}, the interval holds 0" if unclear else ""
    return f"change {changes}: 95 % intervals, paired on {tasks} tasks{winner}{untold and f'; {untold}'}"


def _has_unread(messages: Sequence[Message]) -> bool:
    return any(not call["function"]["name"] for m in messages for call in m.get("tool_calls", []))


def _read_raw_calls(run: str, name: str) -> list[str]:
    """Read what the model wrote where its calls could not be read, in order; nothing where that is not known."""
    store = Store(Path(run))
    try:
        messages = episode.describe_messages(episode.read_episode(store, parse_episode_id(name)), TokenTexts(store))
    except UserError:
        return []
    return [call.get("raw", "") for m in messages for call in m.get("calls", []) if not call["name"]]


def _conversation(console: Console, title: str, messages: Sequence[Message], raw: Sequence[str] = ()) -> None:
    """Print a conversation; ``raw`` is what the model wrote for each call that could not be read."""
    console.print(f"\n{title}", style="bold")
    written = iter(raw)
    for message in messages:
        text = Text(f"  {escape_controls(message['role'], newlines=False):<10}", style="dim")
        parts = [message["content"]] if message["content"] else []
        for call in message.get("tool_calls", []):
            name, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False)
            parts.append(f"→ {name}({arguments})" if name else f"→ (a call that could not be read) {next(written, '')}")
        text.append(escape_controls("  ".join(parts).rstrip()), style=STYLES.get(message["role"], ""))
        console.print(text)
