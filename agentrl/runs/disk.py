"""The disk under a run folder: checks that a run fits on it, and writes that wait until there is room."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeVar

import anyio
from anyio import to_thread

from agentrl.errors import ConfigError, UserError
from agentrl.runs.atomic import FolderWriteError, describe_os_error

T = TypeVar("T")
KEPT_CHECKPOINTS = 2
_LONGEST_S = 60.0  # between two attempts
OVERFLOW_LINK = "elsewhere"  # a link in a run folder to the folder for what has no room in it


@dataclass(frozen=True)
class DiskNeeds:
    """The bytes that a run writes."""

    checkpoint: int
    model: int
    episodes: int = 0  # of all steps that are left

    @property
    def total(self) -> int:
        return KEPT_CHECKPOINTS * self.checkpoint + self.model + self.episodes


def free_bytes(folder: Path) -> int:
    """Return the bytes that this user may still write to the disk where ``folder`` is, or will be."""
    return shutil.disk_usage(_nearest_existing(folder)).free


def _nearest_existing(folder: Path) -> Path:
    return next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())


def _reusable_bytes(folder: Path) -> int:
    """Return the bytes that a run that resumes in ``folder`` replaces: its model, all checkpoints but the newest."""
    older = sorted((folder / "checkpoints").glob("step-*"))[:-1]
    files = [f for p in (folder / "model", *older) for f in p.rglob("*") if f.is_file()]
    return sum(f.stat().st_size for f in files)


def check_disk_space(folder: Path, needs: DiskNeeds, save_every: int, fallback: Path | None = None) -> None:
    """Refuse a run whose model and one checkpoint fit neither on the disk of ``folder`` nor of ``fallback``.

    Args:
        save_every: steps between checkpoints; 0: one at the end, which the run can do without.

    Raises:
        UserError: the sentence has the numbers and the way out.
    """
    free = max(free_bytes(folder) + _reusable_bytes(folder), free_bytes(fallback) if fallback else 0)
    if free >= needs.model + (needs.checkpoint if save_every else 0):
        return
    fits = bool(save_every) and free >= needs.model
    without = f", or --run.save_every 0: without checkpoints it takes {format_bytes(needs.model)}" if fits else ""
    raise UserError(
        f"the run does not fit on the disk of {str(folder)!r}: {format_bytes(free)} are free, a checkpoint takes "
        f"about {format_bytes(needs.checkpoint)}, the model {format_bytes(needs.model)}; free some, give another "
        f"--run.dir{without}"
    )


def prepare_fallback(folder: Path, fallback: Path) -> None:
    """Make the folder for what has no room in ``folder``.

    Raises:
        ConfigError: it cannot be written, or is on the same disk, where it would do nothing.
    """
    try:
        fallback.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=fallback):
            pass
    except OSError as error:
        why = "it is a file" if fallback.is_file() else describe_os_error(error)
        raise ConfigError(f"run.fallback_dir {str(fallback)!r}: {why}; name a folder that can be written") from None
    if _device(fallback) == _device(folder):
        raise ConfigError(
            f"run.fallback_dir {str(fallback)!r} is on the disk of the run folder, and so as full as that: name a "
            "folder on another one, or leave it out"
        )


def _device(folder: Path) -> int:
    """Return the number of the disk where a folder is, or will be."""
    return _nearest_existing(folder).stat().st_dev


def warn_of_shortage(folder: Path, needs: DiskNeeds) -> str | None:
    """Return a sentence if the disk of ``folder`` has less room than the run will need; else None."""
    free = free_bytes(folder) + _reusable_bytes(folder)
    if free >= needs.total:
        return None
    return (
        f"the disk of {str(folder)!r} may be full before the run ends: {format_bytes(free)} are free, and it takes "
        f"about {format_bytes(needs.total)} ({KEPT_CHECKPOINTS} checkpoints of {format_bytes(needs.checkpoint)}, the "
        f"model {format_bytes(needs.model)}, the episodes {format_bytes(needs.episodes)}); what cannot be written then "
        f"waits for room: free some, or ln -s /ANOTHER/DISK {folder / OVERFLOW_LINK}"
    )


def is_disk_full(error: OSError) -> bool:
    """Return True if the disk, or the user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def format_bytes(size: int) -> str:
    """Return a number of bytes as ``1.5 GiB``; small ones as MiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 // 10 else f"{size / 2**20:.1f} MiB"


def _retry_pauses() -> Iterator[float]:
    """Yield the seconds before each further attempt: 1, 2, 4 ... 60, 60 ..."""
    seconds = 1.0
    while True:
        yield seconds
        seconds = min(2 * seconds, _LONGEST_S)


async def retry_write(
    write: Callable[[], T], what: str, advice: str, say: Callable[[str], None], give_up: anyio.Event | None = None
) -> T | None:
    """Call ``write`` in a thread until it succeeds, and return its result; None if it fails after ``give_up`` is set.

    Each failure is reported by ``say``: ``what`` is not written, the system's reason, and the ``advice``.
    """
    waited, stop = 0.0, give_up or anyio.Event()
    for seconds in _retry_pauses():
        try:
            return await to_thread.run_sync(write)
        except (OSError, FolderWriteError) as error:
            why = error.reason if isinstance(error, FolderWriteError) else describe_os_error(error)
        if stop.is_set():
            break
        say(f"{what} not written: {why}; trying again in {seconds:.0f} s ({waited:.0f} s so far). {advice}")
        waited += seconds
        with anyio.move_on_after(seconds):
            await stop.wait()
    say(f"{what} not written: {why}")
    return None


def remove_folder(path: Path) -> None:
    """Remove a folder, or a link and the folder that it leads to."""
    if path.is_symlink():
        shutil.rmtree(path.resolve(), ignore_errors=True)
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def link_folder(path: Path, target: Path) -> None:
    """Replace ``path`` by a link to ``target``."""
    new_link = path.with_name(f".{path.name}.link")
    new_link.unlink(missing_ok=True)
    os.symlink(target.absolute(), new_link)
    remove_folder(path)
    new_link.rename(path)
