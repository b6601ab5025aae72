"""What a killed run goes on from: complete, written aside and renamed, checked when it is read.

checkpoints/step-000010/state.pt      weights that are trained, optimizers, cursor, counters: see `training`
checkpoints/step-000010/digest        sha256 of state.pt: it is there, and right, in a checkpoint that is whole

Read by pickle, as torch does it: go on from your own runs only.
"""

from __future__ import annotations

import os
import shutil
from hashlib import file_digest
from pathlib import Path
from typing import Any

import torch

from agentrl.errors import UserError

KEPT = 2  # the newest


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write a checkpoint, and remove the oldest. A process killed at any moment leaves the one before whole.

    Raises:
        OSError: the disk is full, or the folder cannot be written; the one before is whole.
    """
    target = folder / f"step-{step:06d}"
    aside = folder / f".{target.name}.part"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        with (aside / "state.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        with (aside / "digest").open("w") as file:
            file.write(_digest(aside / "state.pt"))
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:  # torch's word for a full disk
        shutil.rmtree(aside, ignore_errors=True)
        raise OSError(str(error).splitlines()[0]) from error
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(target, ignore_errors=True)  # of a run that went on from an earlier one
    aside.rename(target)
    _sync(folder)
    for old in _steps(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def load(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """The newest checkpoint that is whole, and its step; nothing where none was written yet.

    Raises:
        UserError: there are some, and none is whole.
    """
    found = _steps(folder)
    for path in reversed(found):
        if _whole(path):
            state: dict[str, Any] = torch.load(path / "state.pt", map_location="cpu", weights_only=False)
            return int(path.name.removeprefix("step-")), state
    if found:
        raise UserError(f"no checkpoint in {str(folder)!r} is whole: {', '.join(p.name for p in found)} do not match")
    return None


def _steps(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


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
