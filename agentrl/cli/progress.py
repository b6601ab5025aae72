"""The progress of a run on the command line: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import rich.console
from rich.columns import Columns
from rich.console import ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from agentrl.cli.output import Console, print_line
from agentrl.evaluation.measurement import Evaluation
from agentrl.library.progress import (
    COLUMNS,
    Display,
    PlainLines,
    describe_stopping,
    format_cells,
    format_headline,
)
from agentrl.resources import TrainingResources
from agentrl.runs.folder import RunFolder
from agentrl.settings.schema import TrainConfig
from agentrl.types import Trajectory
from agentrl.view.escaping import escape_controls

BARS = "▁▂▃▄▅▆▇█"
ROWS = 12  # steps shown at once
WIDE = 90  # characters, from which the table has room between its columns


@contextmanager
def open_display(console: Console, config: TrainConfig) -> Iterator[Display]:
    if not console.is_terminal:
        yield PlainLines(partial(print_line, console))
        return
    table = LiveTable(config)
    with Live(table, console=console, refresh_per_second=8, transient=False):
        yield table


class LiveTable(Display):
    """The terminal's picture of a run, drawn anew some times a second."""

    def __init__(self, config: TrainConfig) -> None:
        self.steps = config.steps
        self.title, self.verdict = Text("starting", style="bold"), Text("")
        self.rows: list[dict[str, str]] = []
        self.rewards: list[float] = []
        self.held_out: list[tuple[int, Evaluation]] = []
        self.note = ""
        self.waits = ""
        self.told: list[str] = []
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self.overall = self.progress.add_task("steps", total=config.steps)
        self.current = self.progress.add_task("loading", total=None)

    def on_train_begin(self, resources: TrainingResources, run: RunFolder) -> None:
        self.run_folder, self.steps = run.folder, resources.config.steps  # which epochs come to
        self.progress.update(self.overall, total=self.steps)
        self.title = Text(format_headline(resources, run), style="bold")
        self.verdict = Text(resources.renderer.verdict(), style="dim")

    def on_phase_begin(self, name: str, episodes: int) -> None:
        self.progress.reset(self.current, description=name)
        self.progress.tasks[self.current].total = episodes or None

    def on_episode_end(self, trajectory: Trajectory) -> None:
        task = self.progress.tasks[self.current]
        if task.total is not None and task.completed < task.total:  # others may end that are played ahead
            self.progress.advance(self.current)

    def on_evaluate(self, step: int, evaluation: Evaluation) -> None:
        self.held_out.append((step, evaluation))

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append(format_cells(step, metrics))
        if "reward" in metrics:
            self.rewards.append(metrics["reward"])
        self.progress.update(self.overall, completed=step)

    def on_interrupt(self, by: str) -> None:
        self.note = describe_stopping(by)

    def on_message(self, text: str) -> None:
        self.told.append(text)

    def on_waiting(self, text: str) -> None:
        self.waits = text

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        parts: list[RenderableType] = [self.title, self.verdict, _table(self.rows[-ROWS:], options.max_width)]
        if self.rewards:
            parts.append(Text(f"training reward {_draw_sparkline(self.rewards)} {self.rewards[-1]:.3f}", style="green"))
        if self.held_out:
            shown = Table.grid(padding=(0, 2))
            shown.add_row("held-out reward, sampled/greedy:", Columns([_held(*m) for m in self.held_out[-6:]], (0, 3)))
            parts.append(shown)
        parts.append(self.progress)
        if self.waits:
            parts.append(Text(escape_controls(self.waits), style="dim"))
        parts += [Text(escape_controls(text), style="yellow") for text in self.told[-4:]]
        if self.note:
            parts.append(Text(self.note, style="yellow"))
        yield from parts


def _table(rows: list[dict[str, str]], width: int) -> Table:
    """Return the steps as a table, narrow where two spaces between its columns would cut their names."""
    table = Table(*(rows[-1] if rows else COLUMNS), box=None, header_style="bold cyan", collapse_padding=width < WIDE)
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(*row.values())
    return table


def _draw_sparkline(values: list[float], width: int = 50) -> str:
    """Draw the last values as a row of bars between their least and their greatest."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] for v in shown)


def _held(step: int, evaluation: Evaluation) -> str:
    return f"step {step} {'/'.join(f'{m.reward:.2f}' for _, m in evaluation.parts)}"
