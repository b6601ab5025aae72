"""Checkpoints on the disk: written to a hidden folder, renamed once they are whole, verified when they are read.

checkpoints/step-000010/state.json           cursors, counters, what was drawn: see `training`, and `plain_state`
checkpoints/step-000010/tensors.safetensors  weights that are trained, optimizers, long lists of numbers
checkpoints/step-000010/version              of what the two are made of, and of agentrl
checkpoints/step-000010/digest               sha256 of the two: it is there, and right, in a checkpoint that is whole

Both are data: nothing is run as they are read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from hashlib import file_digest
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from agentrl import __version__
from agentrl.errors import UserError
from agentrl.models.lora import has_adapter
from agentrl.models.tensor_file import check_room, read_header
from agentrl.runs.disk import KEPT_CHECKPOINTS, DiskNeeds, is_disk_full, link_folder, remove_folder
from agentrl.settings.documents import open_regular, read_bounded
from agentrl.settings.schema import TrainConfig
from agentrl.training import plain_state

VERSION = "7"  # another one where a state has other parts, or its classes have

STATE, TENSORS = "state.json", "tensors.safetensors"
_MAX_BYTES = 256 << 20  # of the first
_MAX_VALUES = 5_000_000  # in it: a list of numbers is a tensor
_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}


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
    except (OSError, UserError):
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
    try:
        tree, tensors = plain_state.encode(state)
    except TypeError as error:
        raise UserError(f"a checkpoint cannot hold {error}; numbers, texts, lists, dicts and tensors it can") from None
    with (aside / STATE).open("wb") as file:
        file.write(json.dumps(tree).encode())
        file.flush()
        os.fsync(file.fileno())
    _write_tensors(aside / TENSORS, tensors)
    for name, text in (("version", f"{VERSION} agentrl {__version__}"), ("digest", _digest(aside))):
        with (aside / name).open("w") as words:
            words.write(text)
            words.flush()
            os.fsync(words.fileno())


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, one tensor after the other: no second copy of all of them is in memory."""
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())  # each begins at a multiple of its size
    header, at = {}, 0
    for name in names:
        t = tensors[name]
        end = at + t.numel() * t.element_size()
        header[name] = {"dtype": _DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(tensors[name].cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def load(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """Return the newest checkpoint that is whole with its step; None where none was written yet.

    Raises:
        UserError: there are some, and none is whole; or the newest is of another version of agentrl.
    """
    found = _steps(folder)
    for path in reversed(found):
        if (path / "digest").is_file():
            _check_version(path)
            _check_room(path)
            if _whole(path):
                return _step(path), _read(path)
    if found:
        names = ", ".join(p.name for p in found)
        raise UserError(
            f"no checkpoint in {str(folder)!r} is whole: {names} do not match; what is there is kept: to begin anew, "
            "give another --run.dir"
        )
    return None


def _check_version(path: Path) -> None:
    """Raise UserError for a checkpoint of another version."""
    try:
        version, _, by = read_bounded(path / "version", 200).partition(" ")
    except (OSError, ValueError):
        version, by = "none", "an earlier agentrl"
    if version != VERSION:
        raise UserError(
            f"{str(path)!r} was written by {by}, version {version} of checkpoints; this is agentrl {__version__}, "
            f"version {VERSION}: resume it with the one that wrote it"
        )


def _check_room(path: Path) -> None:
    """Raise UserError for a checkpoint that says that it is larger than it is, or than the memory."""
    try:
        check_room(path / TENSORS)
    except OSError:
        return  # it is not whole
    except ValueError as error:
        raise UserError(f"the checkpoint {str(path)!r} cannot be read: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = read_bounded(path / STATE, _MAX_BYTES)
        if sum(map(text.count, ",[{")) > _MAX_VALUES:
            raise ValueError(f"it holds more than {_MAX_VALUES:,} values")
        tree = json.loads(text)
        read_header(path / TENSORS)
        state = plain_state.decode(tree, safetensors.torch.load_file(path / TENSORS))
        if not isinstance(state, dict):
            raise ValueError("it holds something else")
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise UserError(f"the checkpoint {str(path)!r} cannot be read: {error}") from None
    return state


def _steps(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("step-*") if p.name[5:].isdecimal()), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _whole(path: Path) -> bool:
    try:
        return read_bounded(path / "digest", 200) == _digest(path)
    except (OSError, ValueError):
        return False


def _digest(folder: Path) -> str:
    digests = []
    for name in (STATE, TENSORS):
        with open_regular(folder / name) as file:
            digests.append(file_digest(file, "sha256").hexdigest())
    return " ".join(digests)


def _sync(folder: Path) -> None:
    """The rename itself."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
