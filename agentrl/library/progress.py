"""The progress of a training as lines of text: in a script, a pipe, a log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.evaluation.measurement import Evaluation
from agentrl.library.figures import format_mean
from agentrl.runs.folder import RunFolder
from agentrl.training.callbacks import Callback
from agentrl.view.escaping import escape_controls

if TYPE_CHECKING:
    from agentrl.resources import TrainingResources

COLUMNS = ["step", "reward", "calls", "failed", "tokens/s", "seconds"]
COLUMNS += ["generate", "tools", "learn", "entropy", "faults"]
SFT_COLUMNS = ["step", "nll", "entropy", "grad_norm", "tokens", "seconds"]
_ENGINES = {
    "transformers": "embedded transformers engine",
    "vllm": "vLLM in process",
    "server": "vLLM servers",
    "launched": "vLLM servers of its own",
}


class Display(Callback):
    """A callback that shows a run."""

    run_folder: Path | None = None  # once there is one


class PlainLines(Display):
    """Writes a line a step, an evaluation and a message."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def on_train_begin(self, resources: TrainingResources, run: RunFolder) -> None:
        self.run_folder, self.steps = run.folder, resources.config.steps  # which epochs come to
        self._write(format_headline(resources, run))
        self._write(resources.renderer.verdict())

    def on_evaluate(self, step: int, evaluation: Evaluation) -> None:
        means = [f"{name} {format_mean(m.estimate)}" for name, m in evaluation.parts]
        tasks = max(m.tasks for _, m in evaluation.parts)
        self._write(f"held-out at step {step} ({tasks} tasks): {', '.join(means)}")

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        _, *cells = format_cells(step, metrics).items()
        self._write(f"step {step}/{self.steps}  " + "  ".join(f"{name} {cell}" for name, cell in cells if cell))

    def on_message(self, text: str) -> None:
        self._write(text)

    def on_interrupt(self, by: str) -> None:
        self._write(describe_stopping(by))


def write_line(text: str) -> None:
    """Print a line; a reader that has gone, or an encoding without its characters, ends no run."""
    with suppress(OSError, ValueError):
        try:
            print(escape_controls(text), flush=True)
        except UnicodeEncodeError:
            print(escape_controls(text).encode("ascii", "replace").decode(), flush=True)


def format_headline(resources: TrainingResources, run: RunFolder) -> str:
    """Name the environment, the model, the engine, the seed and the run folder in one line."""
    model = resources.policy.model
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    device = next(model.parameters()).device.type
    return (
        f"{resources.spec.name} · {resources.config.model} ({millions:.2f} M parameters, {device}) · "
        f"{_ENGINES.get(name := resources.config.engine.name, name)} · seed {resources.config.seed} · {run.folder}"
    )


def format_cells(step: int, v: Mapping[str, float]) -> dict[str, str]:
    """Format a step as a row, by the names of ``COLUMNS``; of ``SFT_COLUMNS`` where it learns from demonstrations."""
    if "nll" in v and "reward" not in v:
        cells = [
            str(step),
            f"{v['nll']:.3f}",
            f"{v['entropy']:.2f}",
            f"{v['grad_norm']:.2f}",
            f"{v['trained_tokens']:,.0f}",
            f"{v['step_time']:.1f}",
        ]
        return dict(zip(SFT_COLUMNS, cells, strict=True))
    faults = int(sum(n for name, n in v.items() if name.startswith("faults/") and name != "faults/provoked"))
    cells = [
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
    return dict(zip(COLUMNS, cells, strict=True))


def describe_stopping(by: str) -> str:
    """Say what the first signal makes a run do."""
    return f"{by}: finishing this step, then saving a checkpoint and the model. Again to leave now."
