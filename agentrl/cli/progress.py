"""The progress of a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from agentrl.cli.figures import format_mean
from agentrl.evaluation.measurement import Evaluation
from agentrl.resources import TrainingResources
from agentrl.runs.folder import RunFolder
from agentrl.settings.schema import TrainConfig
from agentrl.training.callbacks import Callback
from agentrl.types import Trajectory
from agentrl.view.escaping import escape_controls

BARS = "▁▂▃▄▅▆▇█"
ROWS = 12  # steps shown at once
WIDE = 90  # characters, from which the table has room between its columns


class Display(Callback):
    """A callback that shows a run."""

    run_folder: Path | None = None  # once there is one


@contextmanager
def open_display(console: Console, config: TrainConfig) -> Iterator[Display]:
    if not console.is_terminal:
        yield PlainLines(console, config)
        return
    table = LiveTable(config)
    with Live(table, console=console, refresh_per_second=8, transient=False):
        yield table


def _format_headline(resources: TrainingResources, run: RunFolder) -> str:
    """Name the environment, the model, the engine, the seed and the run folder in one line."""
    model = resources.policy.model
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    device = next(model.parameters()).device.type
    return (
        f"{resources.spec.name} · {resources.config.model} ({millions:.2f} M parameters, {device}) · "
        f"{_ENGINES[resources.config.engine.name]} · seed {resources.config.seed} · {run.folder}"
    )


_ENGINES = {"transformers": "embedded transformers engine", "vllm": "vLLM in process", "server": "vLLM servers"}


def _format_cells(step: int, v: Mapping[str, float]) -> list[str]:
    """Format a step as a row, in the order of ``COLUMNS``."""
    faults = int(sum(n for name, n in v.items() if name.startswith("faults/")))
    return [
        str(step),
        f"{v.get('reward', float('nan')):.3f}",
        f"{v.get('tools/call_frequency', 0.0):.2f}",
        f"{v.get('tools/failure_frequency', 0.0):.0%}" if v.get("tools/call_frequency") else "-",
        f"{v['tokens_per_second']:,.0f}",
        f"{v['step_time']:.1f}",
        f"{v['time/generate']:.1f}",
        f"{v['time/tools']:.1f}",
        f"{v['time/learn']:.1f}",
        f"{v['entropy']:.2f}" if "entropy" in v else "-",
        str(faults) if faults else "",
    ]


COLUMNS = ["step", "reward", "calls", "failed", "tokens/s", "seconds"]
COLUMNS += ["generate", "tools", "learn", "entropy", "faults"]


class LiveTable(Display):
    """The terminal's picture of a run, drawn anew some times a second."""

    def __init__(self, config: TrainConfig) -> None:
        self.steps = config.steps
        self.title, self.verdict = Text("starting", style="bold"), Text("")
        self.rows: list[list[str]] = []
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

    def on_start(self, resources: TrainingResources, run: RunFolder) -> None:
        self.run_folder, self.steps = run.folder, resources.config.steps  # which epochs come to
        self.progress.update(self.overall, total=self.steps)
        self.title = Text(_format_headline(resources, run), style="bold")
        self.verdict = Text(resources.renderer.verdict(), style="dim")

    def on_phase(self, name: str, episodes: int) -> None:
        self.progress.reset(self.current, description=name)
        self.progress.tasks[self.current].total = episodes or None

    def on_episode(self, trajectory: Trajectory) -> None:
        task = self.progress.tasks[self.current]
        if task.total is not None and task.completed < task.total:  # others may end that are played ahead
            self.progress.advance(self.current)

    def on_evaluation(self, step: int, found: Evaluation) -> None:
        self.held_out.append((step, found))

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append(_format_cells(step, values))
        self.rewards.append(values.get("reward", 0.0))
        self.progress.update(self.overall, completed=step)

    def on_interrupt(self, by: str) -> None:
        self.note = _describe_stopping(by)

    def on_message(self, text: str) -> None:
        self.told.append(text)

    def on_waiting(self, text: str) -> None:
        self.waits = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
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


class PlainLines(Display):
    """For pipes and logs: a line a step."""

    def __init__(self, console: Console, config: TrainConfig) -> None:
        self.console, self.steps = console, config.steps

    def _say(self, text: str) -> None:
        self.console.print(Text(escape_controls(text)), soft_wrap=True)

    def on_start(self, resources: TrainingResources, run: RunFolder) -> None:
        self.run_folder, self.steps = run.folder, resources.config.steps
        self._say(_format_headline(resources, run))
        self._say(resources.renderer.verdict())

    def on_evaluation(self, step: int, found: Evaluation) -> None:
        means = [f"{name} {format_mean(m.estimate)}" for name, m in found.parts]
        tasks = max(m.tasks for _, m in found.parts)
        self._say(f"held-out at step {step} ({tasks} tasks): {', '.join(means)}")

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        row = [
            f"{name} {cell}" for name, cell in zip(COLUMNS[1:], _format_cells(step, values)[1:], strict=True) if cell
        ]
        self._say(f"step {step}/{self.steps}  " + "  ".join(row))

    def on_message(self, text: str) -> None:
        self._say(text)

    def on_interrupt(self, by: str) -> None:
        self._say(_describe_stopping(by))


def _table(rows: list[list[str]], width: int) -> Table:
    """Return the steps as a table, narrow where two spaces between its columns would cut their names."""
    table = Table(*COLUMNS, box=None, header_style="bold cyan", collapse_padding=width < WIDE)
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


def _describe_stopping(by: str) -> str:
    """Say what the first signal makes a run do."""
    return f"{by}: finishing this step, then saving a checkpoint and the model. Again to leave now."


def _draw_sparkline(values: list[float], width: int = 50) -> str:
    """Draw the last values as a row of bars between their least and their greatest."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] for v in shown)


def _held(step: int, found: Evaluation) -> str:
    return f"step {step} {'/'.join(f'{m.reward:.2f}' for _, m in found.parts)}"
