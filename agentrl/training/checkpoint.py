"""Checkpoints on the disk: written to a hidden folder, renamed once they are whole, verified when they are read.

checkpoints/step-000010/state.pt      weights that are trained, optimizers, cursor, counters: see `training`
checkpoints/step-000010/version       of what state.pt is made of, and of agentrl
checkpoints/step-000010/digest        sha256 of state.pt: it is there, and right, in a checkpoint that is whole

Read by pickle, as torch does it: go on from your own runs only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from hashlib import file_digest
from pathlib import Path
from typing import Any

import torch

from agentrl import __version__
from agentrl.errors import UserError
from agentrl.models.lora import has_adapter
from agentrl.runs.disk import KEPT_CHECKPOINTS, DiskNeeds, is_disk_full, link_folder, remove_folder
from agentrl.settings.schema import TrainConfig

VERSION = "6"  # another one where a state has other parts, or its classes have


def save(folder: Path, step: int, state: dict[str, Any], elsewhere: Path | None = None) -> Path:
    """Write a checkpoint, remove the oldest, and return its path.

    A process killed at any moment leaves the one before whole.

    If there is no room, older ones than the newest are removed first, then it is written under ``elsewhere``, where a
    link leads to it.

    Raises:
        OSError: the disk is full, or the folder cannot be written; the newest one before is whole.
    """
    target = folder / f"step-{step:06d}"
    try:
        _save(target, state)
    except OSError as error:
        if is_disk_full(error) and drop_older(folder):
            return save(folder, step, state, elsewhere)
        if elsewhere is not None:
            _save(elsewhere / target.name, state)
            link_folder(target, elsewhere / target.name)
        else:
            raise
    _sync(folder)
    prune(folder, step)
    return target


def _save(target: Path, state: dict[str, Any]) -> None:
    aside = target.with_name(f".{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        _write(aside, state)
    except RuntimeError as error:  # torch closes its file, fails again, and so hides what the system said
        shutil.rmtree(aside, ignore_errors=True)
        said = error.__context__
        raise said if isinstance(said, OSError) else OSError(str(error).splitlines()[0]) from error
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    remove_folder(target)  # of a run that went on from an earlier one
    aside.rename(target)


def drop_older(folder: Path) -> bool:
    """Remove all checkpoints but the newest that is complete; return whether there were any."""
    newest = newest_step(folder)
    older = [p for p in _steps(folder) if newest is not None and _step(p) < newest]
    for path in older:
        remove_folder(path)
    return bool(older)


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint that was written to its end; None where there is none."""
    return max((_step(p) for p in _steps(folder) if (p / "digest").is_file()), default=None)


def estimate_disk_needs(model: Any, config: TrainConfig) -> DiskNeeds:
    """Estimate the bytes of a checkpoint of ``model``, and of the model itself."""
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = sum(p.numel() * p.itemsize for p in trained)
    whole = sum(p.numel() * p.itemsize for p in model.parameters())
    bytes_of = MOMENTS.get(config.learner.optimizer, MOMENTS["adamw"])  # of another one, the most that is usual
    moments = sum(p.numel() * bytes_of(p) for p in trained)
    masters = sum(4 * p.numel() for p in trained if p.itemsize < 4)
    adapter = has_adapter(model)
    reference = whole if config.learner.beta and not adapter else 0
    best = weights if config.run.load_best else 0
    return DiskNeeds(weights + moments + masters + reference + best, weights if adapter else whole)


MOMENTS: dict[str, Callable[[Any], int]] = {  # bytes an optimizer keeps of a weight
    "adamw": lambda p: 8,
    "adamw_8bit": lambda p: 2 if p.numel() >= 4096 else 8,
    "muon": lambda p: 4 if p.ndim == 2 else 8,
}


def describe_newest(folder: Path) -> str:
    """Say what a run could be resumed from."""
    newest = newest_step(folder)
    return "there is none yet" if newest is None else f"that of step {newest} is whole"


def describe_resume(run: Path) -> str:
    """Say how the run in a folder can be resumed, if it can."""
    newest = newest_step(run / "checkpoints")
    if newest is None:
        return f"no checkpoint of the run in {run} was written"
    return f"resume   agentrl train --resume {run}  (after step {newest})"


def prune(folder: Path, step: int) -> None:
    """Remove what a run at a step has no use for: the oldest, damaged ones of later steps, what is half-written."""
    before: list[Path] = []
    later: list[Path] = []
    for path in _steps(folder):
        (later if _step(path) > step else before).append(path)
    for path in [*before[:-KEPT_CHECKPOINTS], *later, *folder.glob(".step-*.part")]:
        remove_folder(path)


def _write(aside: Path, state: dict[str, Any]) -> None:
    with (aside / "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    for name, text in (("version", f"{VERSION} agentrl {__version__}"), ("digest", _digest(aside / "state.pt"))):
        with (aside / name).open("w") as words:
            words.write(text)
            words.flush()
            os.fsync(words.fileno())


def load(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """Return the newest checkpoint that is whole with its step; None where none was written yet.

    Raises:
        UserError: there are some, and none is whole; or the newest is of another version of agentrl.
    """
    found = _steps(folder)
    for path in reversed(found):
        if _whole(path):
            return _step(path), _read(path)
    if found:
        names = ", ".join(p.name for p in found)
        raise UserError(
            f"no checkpoint in {str(folder)!r} is whole: {names} do not match; what is there is kept: to begin anew, "
            "give another --run.dir"
        )
    return None


def _read(path: Path) -> dict[str, Any]:
    file = path / "version"
    version, _, by = file.read_text().partition(" ") if file.exists() else ("none", "", "an earlier agentrl")
    if version != VERSION:
        raise UserError(
            f"{str(path)!r} was written by {by}, version {version} of checkpoints; this is agentrl {__version__}, "
            f"version {VERSION}: resume it with the one that wrote it"
        )
    state: dict[str, Any] = torch.load(path / "state.pt", map_location="cpu", weights_only=False)
    return state


def _steps(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("step-*") if p.name[5:].isdigit()), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _whole(path: Path) -> bool:
    try:
        return (path / "digest").read_text() == _digest(path / "state.pt")
    except OSError:
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """The rename itself."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
