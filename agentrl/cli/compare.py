"""``agentrl compare``."""

from __future__ import annotations

import json

from pydantic import Field
from rich.table import Table
from rich.text import Text

from agentrl.cli.arguments import Arguments, Command
from agentrl.cli.output import Console, print_line
from agentrl.environments.task_sampler import describe_task
from agentrl.evaluation.comparison import Comparison, compare
from agentrl.library.figures import format_difference, format_mean
from agentrl.settings.section import Section
from agentrl.view.escaping import escape_controls

TEXT = """\
  agentrl compare evals/a evals/b           # two evaluations on the same tasks, task by task
  agentrl compare runs/x                    # a training run: before its first step and after its last
  agentrl compare runs/x@0 runs/y@40        # evaluations of training runs, by their steps
  agentrl compare evals/a evals/b evals/c   # each of the others with the first

The difference has a 95 % interval, paired by task. Where it holds 0 there is no clear winner.
"""


class _CompareOptions(Section):
    greedy: bool | None = Field(None, description="true: the greedy trials; the sampled ones by default")
    split: str | None = Field(None, description="the split of the episodes; test by default, or the evaluated one")
    pass_at: float | None = Field(None, description="a trial passes from this reward on; eval.pass_at of A by default")
    show: int = Field(3, ge=0, description="tasks to name of each kind")
    json_: bool = Field(False, description="print one JSON object, or a list of several")


def _run(arguments: Arguments[_CompareOptions]) -> int:
    options = arguments.options
    others: list[str | None] = [*arguments.names[1:]] or [None]
    comparisons = [
        compare(arguments.names[0], other, greedy=options.greedy, split=options.split, pass_at=options.pass_at)
        for other in others
    ]
    if options.json_:
        objects = [c.as_dict() for c in comparisons]
        print(json.dumps(objects if len(objects) > 1 else objects[0], indent=2))
        return 0
    console = Console()
    for comparison in comparisons:
        _print_comparison(console, comparison, options.show)
    return 0


def _print_comparison(console: Console, c: Comparison, shown: int) -> None:
    how = "greedy" if c.greedy else "sampled"
    print_line(
        console, f"{c.env}, {c.difference.tasks} tasks of split {c.split}, {how}, paired by task (95 % intervals)"
    )
    table = Table(box=None, show_header=False)
    for name, words in (
        (c.before, format_mean(c.before_mean)),
        (c.after, format_mean(c.after_mean)),
        ("difference", f"{format_difference(c.difference)}, unpaired {format_difference(c.unpaired)}"),
    ):
        table.add_row(Text(escape_controls(name, newlines=False)), Text(words))
    console.print(table)
    for note in c.notes:
        print_line(console, note)
    console.print(Text(f"\n{c.verdict}\n", style="bold"), soft_wrap=True)
    for kind, pairs in c.pairs.items():
        print_line(console, f"{kind.replace('_', ' '):<12} {len(pairs):>6,}")
        for pair in pairs[:shown] if kind != "still_right" else ():
            print_line(console, f"  {describe_task(pair.task, c.split)}: {pair.before:.3g} -> {pair.after:.3g}")
            for label, episode in ((c.before, pair.before_episode), (c.after, pair.after_episode)):
                print_line(console, f"    agentrl explain {label.rpartition('@')[0] or label} {episode}")
    print_line(console, f"\na task is right where more than half of its trials have a reward of {c.pass_at:g} or more")


COMMAND = Command("compare", "A B... [--SETTING VALUE]", TEXT, _run, _CompareOptions, names=(1, None))
