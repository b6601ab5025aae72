"""Trackers: wandb, tensorboard, trackio, mlflow and the others that accelerate knows, by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from agentrl.errors import UserError, nearest
from agentrl.types import Trajectory

COLUMNS = ["step", "task", "reward", "stop", "calls", "conversation"]
SHOWN = 8  # episodes of a step
MAX_CHARS = 4_000  # of a conversation


class Tracking:
    """What is logged goes to each tracker. One that fails is told of and left: a run does not end for it."""

    def __init__(self, trackers: Sequence[Any], said: Callable[[str], None]) -> None:
        self.trackers, self.said = list(trackers), said

    def log(self, step: int, values: Mapping[str, float]) -> None:
        finite = {k: float(v) for k, v in values.items() if isinstance(v, int | float) and isfinite(v)}
        self._each(lambda t: t.log(finite, step=step))

    def episodes(self, step: int, played: Sequence[Trajectory]) -> None:
        """Some episodes of a step as a table, the best and the worst first; as text where a tracker has no tables."""
        rows = [_row(step, t) for t in _telling(played)]

        def tell(tracker: Any) -> None:
            if hasattr(tracker, "log_table"):
                tracker.log_table("episodes", columns=COLUMNS, data=rows, step=step)
            else:
                tracker.log({f"episodes/{i}": _text(row) for i, row in enumerate(rows[:2])}, step=step)

        if rows:
            self._each(tell)

    def finish(self) -> None:
        self._each(lambda t: t.finish())

    def _each(self, do: Callable[[Any], None]) -> None:
        for tracker in list(self.trackers):
            try:
                do(tracker)
            except Exception as error:  # somebody else's server
                self.trackers.remove(tracker)
                self.said(f"tracker {tracker.name}: {type(error).__name__}: {error}; nothing more is logged there")


@contextmanager
def tracking(
    names: Sequence[str],
    project: str,
    folder: Path,
    config: Mapping[str, Any],
    said: Callable[[str], None],
    begun: int = 0,
) -> Iterator[Tracking]:
    """Trackers that are started and finished.

    Args:
        project: what a tracker calls the place of many runs; the run is called as its folder.
        config: dotted names and values.
        begun: the step after which a run goes on: what a tracker has of later ones is said again.

    Raises:
        UserError: there is no such tracker, its package is not installed, or it does not start.
    """
    found = Tracking([_started(name, project, folder, config, begun) for name in names], said)
    try:
        yield found
    finally:
        found.finish()


def check(names: Sequence[str]) -> None:
    """Raises UserError for a name that is no tracker's, or where a package is missing."""
    if not names:
        return
    try:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    except ImportError:
        raise UserError("run.trackers needs the package accelerate: pip install 'agentrl-gym[track]'") from None
    known = [str(n) for n in LOGGER_TYPE_TO_CLASS]
    for name in names:
        if name not in known:
            raise UserError(f"run.trackers: no tracker {name!r}{nearest(name, known)}")
        if name not in [str(n) for n in get_available_trackers()]:
            raise UserError(f"run.trackers: {name} needs its package: pip install {name}")


def _started(name: str, project: str, folder: Path, config: Mapping[str, Any], begun: int) -> Any:
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    check([name])
    PartialState()
    kind = LOGGER_TYPE_TO_CLASS[name]
    run = folder.resolve().name
    given = _given(name, run, folder, begun)
    if name == "wandb":
        os.environ.setdefault("WANDB_SILENT", "true")
    try:
        tracker = (
            kind(".", logging_dir=str(folder / name), **given)
            if kind.requires_logging_directory
            else kind(project, **given)
        )
        if hasattr(tracker, "start"):
            tracker.start()
        if name != "tensorboard":  # which makes a run of its own of them
            tracker.store_init_configuration(dict(config))
    except Exception as error:  # somebody else's server
        raise UserError(f"tracker {name} does not start: {type(error).__name__}: {error}") from error
    return tracker


def _given(name: str, run: str, folder: Path, begun: int) -> dict[str, Any]:
    """What a tracker is told beside the project; where a run goes on, by what it finds the one before."""
    given: dict[str, Any] = {}
    if name == "wandb":
        given = {"name": run, "dir": str(folder)}
        before = sorted((folder / "wandb").glob("*run-*-*"), key=lambda p: p.name.partition("run-")[2])
        if begun and before:
            given |= {"id": before[-1].name.rpartition("-")[2], "resume": "allow"}
    if name == "mlflow":
        given = {"run_name": run}
    if name == "trackio":
        given = {"name": run} | ({"resume": "allow"} if begun else {})
    if name == "tensorboard" and (folder / "tensorboard").exists():
        given = {"purge_step": begun + 1 if begun else 0}  # what is there of these steps is shown no more
    return given


def _telling(played: Sequence[Trajectory]) -> list[Trajectory]:
    scored = sorted((t for t in played if t.reward is not None), key=lambda t: t.reward or 0.0)
    half = SHOWN // 2
    return scored[::-1] if len(scored) <= SHOWN else [*reversed(scored[-half:]), *scored[:half]]


def _row(step: int, t: Trajectory) -> list[Any]:
    said = "\n\n".join(f"{m['role']}: {m['content']}" for m in t.messages)
    return [step, t.task, t.reward, t.stop.value, len(t.calls), said[:MAX_CHARS]]


def _text(row: Sequence[Any]) -> str:
    """Indented, as Markdown takes what is to be left as it is."""
    head = ", ".join(f"{name} {value}" for name, value in zip(COLUMNS[:-1], row, strict=False))
    return f"{head}\n\n" + "\n".join(f"    {line}" for line in str(row[-1]).splitlines())
