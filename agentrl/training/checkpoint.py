"""Checkpoints on the disk: written to a hidden folder, renamed once they are whole, verified when they are read.

checkpoints/step-000010/state.json           cursors, counters, what was drawn: see `training`, and `plain_state`
checkpoints/step-000010/tensors.safetensors  weights that are trained, optimizers, long lists of numbers
checkpoints/step-000010/version              of what the two are made of, and of agentrl
checkpoints/step-000010/digest               sha256 of the two: it is there, and right, in a checkpoint that is whole

Of a learner in shards, the weights and the optimizers are in a file of each process, whose sha256 follow in the digest:

checkpoints/step-000010/shard-00001-of-00004.safetensors    see `agentrl.learner.part_writer`

All are data: nothing is run as they are read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import file_digest
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from torch import Tensor

from agentrl import __version__
from agentrl.errors import UserError
from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.part_writer import PartCheck, PartWriter, check_parts, describe_ranks, name_part
from agentrl.models.lora import has_adapter
from agentrl.models.saved_tensor import SavedTensor, find_saved_tensors
from agentrl.models.tensor_file import check_room, read_header, write_tensors
from agentrl.runs.disk import KEPT_CHECKPOINTS, DiskNeeds, is_disk_full, link_folder, remove_folder
from agentrl.runs.folder import spell_resume
from agentrl.settings.documents import open_regular, read_bounded
from agentrl.settings.schema import TrainConfig
from agentrl.training import plain_state

VERSION = "8"  # another one where a state has other parts, or its classes have

STATE, TENSORS = "state.json", "tensors.safetensors"
_MAX_BYTES = 256 << 20  # of the first
_MAX_DIGEST = 8 << 20  # of so many processes
_MAX_VALUES = 5_000_000  # in it: a list of numbers is a tensor


class _EncodedState(NamedTuple):
    """A state as it is written: JSON, and the tensors that it names."""

    tree: bytes
    tensors: dict[str, Tensor]


def encode_state(state: dict[str, Any]) -> _EncodedState:
    """Encode a state. Raises UserError: it holds what no checkpoint can."""
    try:
        tree, tensors = plain_state.encode(state)
    except TypeError as error:
        raise UserError(f"a checkpoint cannot hold {error}; numbers, texts, lists, dicts and tensors it can") from None
    return _EncodedState(json.dumps(tree).encode(), tensors)


def save(
    folder: Path,
    step: int,
    state: dict[str, Any] | _EncodedState,
    elsewhere: Path | None = None,
    parts: PartWriter | None = None,
) -> Path:
    """Write a checkpoint, remove the oldest, and return its path.

    A process killed at any moment leaves the one before whole.

    If there is no room, older ones than the newest are removed first, then it is written under ``elsewhere``, where a
    link leads to it.

    Args:
        state: or what `encode_state` made of it: the original may change meanwhile.
        parts: writes what is staged in every process.

    Raises:
        OSError: the disk is full, or the folder cannot be written; the newest one before is whole.
    """
    target = folder / f"step-{step:06d}"
    state = state if isinstance(state, _EncodedState) else encode_state(state)
    try:
        _write(target, state, parts)
    except OSError as error:
        if is_disk_full(error) and drop_older(folder):
            return save(folder, step, state, elsewhere, parts)
        if elsewhere is not None:
            _write(elsewhere / target.name, state, parts)
            link_folder(target, elsewhere / target.name)
        else:
            raise
    _sync(folder)
    prune(folder, step)
    return target


def _write(target: Path, state: _EncodedState, parts: PartWriter | None) -> None:
    aside = target.with_name(f".{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        _write_files(aside, state, parts)
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
    return f"resume   {spell_resume(run)}  (after step {newest})"


def prune(folder: Path, step: int) -> None:
    """Remove what a run at a step has no use for: the oldest, damaged ones of later steps, what is half-written."""
    before: list[Path] = []
    later: list[Path] = []
    for path in _steps(folder):
        (later if _step(path) > step else before).append(path)
    for path in [*before[:-KEPT_CHECKPOINTS], *later, *folder.glob(".step-*.part")]:
        remove_folder(path)


def _write_files(aside: Path, state: _EncodedState, parts: PartWriter | None) -> None:
    with (aside / STATE).open("wb") as file:
        file.write(state.tree)
        file.flush()
        os.fsync(file.fileno())
    with (aside / TENSORS).open("wb") as file:
        write_tensors(file, state.tensors)
        file.flush()
        os.fsync(file.fileno())
    digests = parts.write(aside) if parts is not None else []
    for name, text in (
        ("version", f"{VERSION} agentrl {__version__}"),
        ("digest", " ".join([*_compute_digests(aside), *digests])),
    ):
        with (aside / name).open("w") as words:
            words.write(text)
            words.flush()
            os.fsync(words.fileno())


def load(
    folder: Path, process_group: ProcessGroup | None = None, *, by_parts: bool = False
) -> tuple[int, dict[str, Any]] | None:
    """Return the newest checkpoint that is whole with its step; None where none was written yet.

    The learner's tensors are left in the files where there are shards of them, to be read by each process.

    Args:
        process_group: whose processes verify a share of the shards each: they call `check_parts` when they are asked.
        by_parts: the learner's tensors are left there in any case.

    Raises:
        UserError: there are some, and none is whole; or the newest is of another version of agentrl.
    """
    found = _steps(folder)
    for path in reversed(found):
        if (path / "digest").is_file():
            _check_version(path)
            _check_room(path)
            if (shards := _find_shards(path, process_group or ProcessGroup())) is not None:
                return _step(path), _read(path, shards, by_parts=by_parts)
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
        for file in (path / TENSORS, *path.glob("shard-*")):
            check_room(file)
    except OSError:
        return  # it is not whole
    except ValueError as error:
        raise UserError(f"the checkpoint {str(path)!r} cannot be read: {error}") from None


def _read(path: Path, shards: Sequence[Path], *, by_parts: bool) -> dict[str, Any]:
    try:
        text = read_bounded(path / STATE, _MAX_BYTES)
        if sum(map(text.count, ",[{")) > _MAX_VALUES:
            raise ValueError(f"it holds more than {_MAX_VALUES:,} values")
        tree = json.loads(text)
        if not isinstance(tree, dict):
            raise ValueError("it holds something else")
        if not shards and not by_parts:
            read_header(path / TENSORS)
            return _decode(tree, safetensors.torch.load_file(path / TENSORS))
        saved = find_saved_tensors([path / TENSORS, *shards])
        learner = _decode({"learner": tree.pop("learner", None)}, saved)
        return _decode(tree, _ReadTensors(saved)) | learner
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise UserError(f"the checkpoint {str(path)!r} cannot be read: {error}") from None


def _decode(tree: dict[str, Any], tensors: Mapping[str, Tensor] | Mapping[str, SavedTensor]) -> dict[str, Any]:
    state = plain_state.decode(tree, tensors)
    if not isinstance(state, dict):
        raise ValueError("it holds something else")
    return state


class _ReadTensors(Mapping[str, Tensor]):
    """Tensors in files, each read when it is asked for."""

    def __init__(self, saved: Mapping[str, SavedTensor]) -> None:
        self._saved = saved

    def __getitem__(self, name: str) -> Tensor:
        return self._saved[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)


def _steps(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("step-*") if p.name[5:].isdecimal()), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _find_shards(path: Path, process_group: ProcessGroup) -> list[Path] | None:
    """Return the files of the shards of a checkpoint, in order; None if anything is not as it was written."""
    try:
        state, tensors, *digests = read_bounded(path / "digest", _MAX_DIGEST).split(" ")
        if [state, tensors] != _compute_digests(path):
            return None
    except (OSError, ValueError):
        return None
    shards = [path / name_part(rank, len(digests)) for rank in range(len(digests))]
    if not all(file.is_file() for file in shards):
        return None
    if shards:
        check = PartCheck(str(path.absolute()), tuple(digests))
        with process_group.taking_part():
            process_group.broadcast(check)
            found = check_parts(process_group, check)
        if blind := [rank for rank, share in enumerate(found) if None in share]:
            raise UserError(
                f"{describe_ranks(blind)} of the learner's processes do not see the shards in {str(path)!r}: the run "
                "folder has to be on a disk that all machines have; or go on with one process, which needs no other"
            )
        if not all(all(share) for share in found):
            return None
    return shards


def _compute_digests(folder: Path) -> list[str]:
    digests = []
    for name in (STATE, TENSORS):
        with open_regular(folder / name) as file:
            digests.append(file_digest(file, "sha256").hexdigest())
    return digests


def _sync(folder: Path) -> None:
    """The rename itself."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
