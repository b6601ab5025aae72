"""``agentrl compare``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.cli.figures import format_difference, format_mean
from agentrl.cli.words import flags_told, split
from agentrl.comparison import Comparison, compare
from agentrl.config import Section
from agentrl.view.text import visible

HELP = """usage: agentrl compare A B... [--greedy true] [--json]

  agentrl compare evals/a evals/b           # two evaluations on the same tasks, task by task
  agentrl compare runs/x                    # a training run: before its first step and after its last
  agentrl compare runs/x@0 runs/y@40        # evaluations of training runs, by their steps
  agentrl compare evals/a evals/b evals/c   # each of the others with the first

The difference has a 95 % interval, paired by task. Where it holds 0 there is no clear winner.
"""


class Settings(Section):
    greedy: bool | None = Field(None, description="true: the greedy trials; by default the sampled ones")
    split: str | None = Field(None, description="which episodes; test by default, or those that were evaluated")
    pass_at: float | None = Field(
        None, description="the reward from which on a trial passes; by default eval.pass_at of A"
    )
    show: int = Field(3, ge=0, description="tasks to name of each kind [3]")


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(f"{HELP}\n{flags_told(Settings)}\n  --json     one JSON object, or a list of several")
        return 0
    words, as_json = _without_json(words)
    names, own = split(words, Settings, "A B... [--SETTING VALUE]")
    others: list[str | None] = [*names[1:]] or [None]
    found = [compare(names[0], b, greedy=own.greedy, split=own.split, pass_at=own.pass_at) for b in others]
    if as_json:
        plain = [c.as_dict() for c in found]
        print(json.dumps(plain if len(plain) > 1 else plain[0], indent=2))
        return 0
    console = Console()
    for comparison in found:
        _show(console, comparison, own.show)
    return 0


def _without_json(words: Sequence[str]) -> tuple[list[str], bool]:
    """Take ``--json`` out of the words: it needs no value, but may have one."""
    left = list(words)
    if "--json" not in left:
        return left, False
    at = left.index("--json")
    following = left[at + 1 : at + 2]
    del left[at : at + (2 if following in (["true"], ["false"]) else 1)]
    return left, following != ["false"]


def _show(console: Console, c: Comparison, shown: int) -> None:
    how = "greedy" if c.greedy else "sampled"
    _say(console, f"{c.env}, {c.difference.tasks} tasks of split {c.split}, {how}, paired by task (95 % intervals)")
    table = Table(box=None, show_header=False)
    for name, words in (
        (c.before, format_mean(c.before_mean)),
        (c.after, format_mean(c.after_mean)),
        ("difference", f"{format_difference(c.difference)}, unpaired {format_difference(c.unpaired)}"),
    ):
        table.add_row(Text(visible(name, newlines=False)), Text(words))
    console.print(table)
    for note in c.notes:
        _say(console, note)
    console.print(Text(f"\n{c.verdict}\n", style="bold"), soft_wrap=True)
    for kind, pairs in c.pairs.items():
        _say(console, f"{kind.replace('_', ' '):<12} {len(pairs):>6,}")
        for pair in pairs[:shown] if kind != "still_right" else ():
            _say(console, f"  task {pair.task}: {pair.before:.3g} -> {pair.after:.3g}")
            for label, episode in ((c.before, pair.before_episode), (c.after, pair.after_episode)):
                _say(console, f"    agentrl explain {label.rpartition('@')[0] or label} {episode}")
    _say(console, f"\na task is right where more than half of its trials have a reward of {c.pass_at:g} or more")


def _say(console: Console, text: str) -> None:
    console.print(visible(text), markup=False, highlight=False, soft_wrap=True)
