"""The progress of a training in a notebook: one table that is updated in place."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from agentrl.evaluation.measurement import Evaluation
from agentrl.library.figures import format_mean
from agentrl.library.progress import COLUMNS, Display, describe_stopping, format_cells, format_headline
from agentrl.library.run_html import STYLE
from agentrl.runs.folder import RunFolder
from agentrl.types import Trajectory
from agentrl.view.escaping import escape_controls, escape_html
from agentrl.view.svg_chart import Curve, draw_curves

if TYPE_CHECKING:
    from agentrl.resources import TrainingResources

STEPS = 8  # that the table shows
SENTENCES = 4
REFRESH_S = 0.5  # between two updates for episodes


class NotebookTable(Display):
    """A display of IPython: the last steps, the rewards as curves, and what the run says."""

    def __init__(self) -> None:
        self.title = "starting"
        self.steps = self.done = 0
        self.phase, self.announced, self.ended = "", 0, 0  # episodes
        self.rows: list[dict[str, str]] = []
        self.training, self.held_out = Curve("training", [], []), Curve("held out", [], [], dots=True)
        self.evaluation, self.waits = "", ""
        self.sentences: list[str] = []
        self._handle: Any = None
        self._shown = 0.0

    def on_train_begin(self, resources: TrainingResources, run: RunFolder) -> None:
        from IPython.display import display

        self.run_folder, self.steps = run.folder, resources.config.steps
        self.title = format_headline(resources, run)
        self._handle = display(self, display_id=True)

    def on_phase_begin(self, name: str, episodes: int) -> None:
        self.phase, self.announced, self.ended = name, episodes, 0
        self._update(REFRESH_S)

    def on_episode_end(self, trajectory: Trajectory) -> None:
        self.ended = min(self.ended + 1, self.announced)  # others may end that are rolled out ahead
        self._update(REFRESH_S)

    def on_evaluate(self, step: int, evaluation: Evaluation) -> None:
        means = ", ".join(f"{name} {format_mean(m.estimate)}" for name, m in evaluation.parts)
        self.evaluation = f"held-out reward after step {step}: {means}"
        self.held_out.steps.append(step)  # type: ignore[attr-defined]
        self.held_out.values.append(evaluation.first.reward)  # type: ignore[attr-defined]
        self._update()

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self.done = step
        self.rows = [*self.rows, format_cells(step, metrics)][-STEPS:]
        if "reward" in metrics:
            self.training.steps.append(step)  # type: ignore[attr-defined]
            self.training.values.append(metrics["reward"])  # type: ignore[attr-defined]
        self._update()

    def on_message(self, text: str) -> None:
        self.sentences = [*self.sentences, text][-SENTENCES:]
        self._update()

    def on_interrupt(self, by: str) -> None:
        self.on_message(describe_stopping("interrupt" if by == "Ctrl-C" else by))

    def on_waiting(self, text: str) -> None:
        if text != self.waits:
            self.waits = text
            self._update()

    def on_train_end(self, summary: Mapping[str, Any]) -> None:
        self.phase, self.waits = "interrupted, and saved" if summary["interrupted"] else "ended", ""
        self.announced = 0
        self._update()

    def _update(self, at_most_every_s: float = 0.0) -> None:
        """Draw the table anew. A page that has gone ends no run."""
        now = time.monotonic()
        if self._handle is None or now - self._shown < at_most_every_s:
            return
        self._shown = now
        with suppress(OSError):
            self._handle.update(self)

    def _describe_phase(self) -> str:
        episodes = f" {self.ended}/{self.announced} episodes" if self.announced else ""
        return f"step {self.done}/{self.steps} · {self.phase}{episodes}"

    def __repr__(self) -> str:
        return escape_controls("\n".join([self.title, self._describe_phase(), self.evaluation, *self.sentences]))

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in (self.rows[-1] if self.rows else COLUMNS))
        rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row.values())}</tr>" for row in self.rows)
        lines = [self._describe_phase(), self.evaluation, self.waits, *self.sentences]
        notes = "<br>".join(escape_html(line) for line in lines if line)
        figure = draw_curves("reward", [self.training, self.held_out])
        return (
            f'<div class="agentrl">{STYLE}<b>{escape_html(self.title)}</b>'
            f'<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{figure}<div class="note">{notes}</div>'
            "</div>"
        )


def in_notebook() -> bool:
    """Return True if a kernel of Jupyter runs this process."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
