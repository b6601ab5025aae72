"""Trackers: wandb, tensorboard, trackio, mlflow and the others that accelerate knows, by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from agentrl.errors import UserError, suggest
from agentrl.settings.secret import scrub
from agentrl.types import Trajectory

COLUMNS = ["step", "task", "reward", "stop", "calls", "conversation"]
_SHOWN = 8  # episodes of a step
_MAX_CHARS = 4_000  # of a conversation
NUMBERS_ALONE = ("mlflow",)  # trackers whose log takes no text


class Trackers:
    """Several trackers as one. One that fails is reported and dropped: a run does not end for it."""

    def __init__(self, trackers: Sequence[Any], say: Callable[[str], None]) -> None:
        self.trackers, self.say = list(trackers), say

    def log(self, step: int, values: Mapping[str, float]) -> None:
        finite = {k: float(v) for k, v in values.items() if isinstance(v, int | float) and isfinite(v)}
        self._each(lambda t: t.log(finite, step=step))

    def episodes(self, step: int, played: Sequence[Trajectory]) -> None:
        """Log some episodes of a step as a table, the best and the worst first; as text where a tracker has no tables.

        Nothing where it has no texts either: mlflow warns of each, and drops it.
        """
        rows = [_row(step, t) for t in _select(played)]

        def log_rows(tracker: Any) -> None:
            if hasattr(tracker, "log_table"):
                tracker.log_table("episodes", columns=COLUMNS, data=rows, step=step)
            elif tracker.name not in NUMBERS_ALONE:
                tracker.log({f"episodes/{i}": _text(row) for i, row in enumerate(rows[:2])}, step=step)

        if rows:
            self._each(log_rows)

    def finish(self) -> None:
        self._each(lambda t: t.finish())

    def _each(self, do: Callable[[Any], None]) -> None:
        for tracker in list(self.trackers):
            try:
                do(tracker)
            except Exception as error:  # somebody else's server
                self.trackers.remove(tracker)
                self.say(f"tracker {tracker.name}: {type(error).__name__}: {error}; nothing more is logged there")


@contextmanager
def open_trackers(
    names: Sequence[str],
    project: str,
    folder: Path,
    config: Mapping[str, Any],
    say: Callable[[str], None],
    begun: int = 0,
) -> Iterator[Trackers]:
    """Start the trackers, and finish them at the end.

    Args:
        project: the trackers' name for a place of many runs; the run has the name of its folder.
        config: dotted names and values.
        begun: the step after which a run resumes: later ones are logged again.

    Raises:
        UserError: there is no such tracker, its package is not installed, or it does not start.
    """
    trackers = Trackers([_start_tracker(name, project, folder, config, begun) for name in names], say)
    try:
        yield trackers
    finally:
        trackers.finish()


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a name that is no tracker's, or whose package is missing, by a UserError."""
    if not names:
        return
    try:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    except ImportError:
        raise UserError("run.trackers needs the package accelerate: pip install 'agentrl-gym[track]'") from None
    known = [str(n) for n in LOGGER_TYPE_TO_CLASS]
    for name in names:
        if name not in known:
            raise UserError(f"run.trackers: no tracker {name!r}{suggest(name, known)}")
        if name not in [str(n) for n in get_available_trackers()]:
            raise UserError(f"run.trackers: {name} needs its package: pip install {name}")


def _start_tracker(name: str, project: str, folder: Path, config: Mapping[str, Any], begun: int) -> Any:
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    check_trackers([name])
    PartialState()
    kind = LOGGER_TYPE_TO_CLASS[name]
    run = folder.resolve().name
    arguments = _tracker_arguments(name, run, folder, begun)
    if name == "wandb":
        os.environ.setdefault("WANDB_SILENT", "true")
    try:
        tracker = (
            kind(".", logging_dir=str(folder / name), **arguments)
            if kind.requires_logging_directory
            else kind(project, **arguments)
        )
        if hasattr(tracker, "start"):
            tracker.start()
        if name != "tensorboard":  # which makes a run of its own of them
            tracker.store_init_configuration({k: scrub(v) if isinstance(v, str) else v for k, v in config.items()})
    except Exception as error:  # somebody else's server
        raise UserError(f"tracker {name} does not start: {type(error).__name__}: {error}") from error
    return tracker


def _tracker_arguments(name: str, run: str, folder: Path, begun: int) -> dict[str, Any]:
    """Return a tracker's arguments beside the project, among them those by which it resumes a run."""
    arguments: dict[str, Any] = {}
    if name == "wandb":
        arguments = {"name": run, "dir": str(folder)}
        before = sorted((folder / "wandb").glob("*run-*-*"), key=lambda p: p.name.partition("run-")[2])
        if begun and before:
            arguments |= {"id": before[-1].name.rpartition("-")[2], "resume": "allow"}
    if name == "mlflow":
        arguments = {"run_name": run}
    if name == "trackio":
        arguments = {"name": run} | ({"resume": "allow"} if begun else {})
    if name == "tensorboard" and (folder / "tensorboard").exists():
        arguments = {"purge_step": begun + 1 if begun else 0}  # what is there of these steps is shown no more
    return arguments


def _select(played: Sequence[Trajectory]) -> list[Trajectory]:
    scored = sorted((t for t in played if t.reward is not None), key=lambda t: t.reward or 0.0)
    half = _SHOWN // 2
    return scored[::-1] if len(scored) <= _SHOWN else [*reversed(scored[-half:]), *scored[:half]]


def _row(step: int, t: Trajectory) -> list[Any]:
    conversation = "\n\n".join(f"{m['role']}: {m['content']}" for m in t.messages)
    return [step, t.task, t.reward, t.stop.value, len(t.calls), scrub(conversation)[:_MAX_CHARS]]


def _text(row: Sequence[Any]) -> str:
    """Return a row as text, indented so that Markdown leaves it as it is."""
    head = ", ".join(f"{name} {value}" for name, value in zip(COLUMNS[:-1], row, strict=False))
    return f"{head}\n\n" + "\n".join(f"    {line}" for line in str(row[-1]).splitlines())
