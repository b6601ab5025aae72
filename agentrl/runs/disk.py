"""The disk under a run folder: whether a run fits on it, and writes that wait until there is room."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import anyio
from anyio import to_thread

from agentrl.errors import UserError
from agentrl.folder import Unwritable, reason

T = TypeVar("T")
KEPT = 2  # checkpoints
LONGEST_S = 60.0  # between two attempts
ELSEWHERE = "elsewhere"  # a link of this name in a run folder tells where to write what has no room in it


@dataclass(frozen=True)
class Needs:
    """Bytes that a run writes."""

    checkpoint: int
    model: int
    episodes: int = 0  # of all steps that are left

    @property
    def total(self) -> int:
        return KEPT * self.checkpoint + self.model + self.episodes


def free_bytes(folder: Path) -> int:
    """Return what this user may still write where ``folder`` is, or will be made."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free


def reusable_bytes(folder: Path) -> int:
    """Return the bytes of what a run that goes on in ``folder`` replaces: its model, all checkpoints but the newest."""
    older = sorted((folder / "checkpoints").glob("step-*"))[:-1]
    files = [f for p in (folder / "model", *older) for f in p.rglob("*") if f.is_file()]
    return sum(f.stat().st_size for f in files)


def check_room(folder: Path, needs: Needs, save_every: int, fallback: Path | None = None) -> None:
    """Refuse a run whose model, and one checkpoint beside it, fit neither on ``folder``'s disk nor ``fallback``'s.

    Args:
        save_every: steps between checkpoints; 0: one at the end, which the run can do without.

    Raises:
        UserError: the sentence has the numbers and the way out.
    """
    free = max(free_bytes(folder) + reusable_bytes(folder), free_bytes(fallback) if fallback else 0)
    if free >= needs.model + (needs.checkpoint if save_every else 0):
        return
    fits = bool(save_every) and free >= needs.model
    without = f", or --run.save_every 0: without checkpoints it takes {in_words(needs.model)}" if fits else ""
    raise UserError(
        f"the run does not fit on the disk of {str(folder)!r}: {in_words(free)} are free, a checkpoint takes about "
        f"{in_words(needs.checkpoint)}, the model {in_words(needs.model)}; free some, give another --run.dir{without}"
    )


def room_warning(folder: Path, needs: Needs) -> str | None:
    """Return a sentence where the disk of ``folder`` has less than the run is going to write; else None."""
    free = free_bytes(folder) + reusable_bytes(folder)
    if free >= needs.total:
        return None
    return (
        f"the disk of {str(folder)!r} may be full before the run ends: {in_words(free)} are free, and it takes about "
        f"{in_words(needs.total)} ({KEPT} checkpoints of {in_words(needs.checkpoint)}, the model "
        f"{in_words(needs.model)}, the episodes {in_words(needs.episodes)}); what cannot be written then waits for "
        f"room: free some, or ln -s /ANOTHER/DISK {folder / ELSEWHERE}"
    )


def is_full(error: OSError) -> bool:
    """Return whether the disk, or the user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def in_words(size: int) -> str:
    """Return a number of bytes as ``1.5 GiB``; small ones as MiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 // 10 else f"{size / 2**20:.1f} MiB"


def pauses() -> Iterator[float]:
    """Yield the seconds before each further attempt: 1, 2, 4 ... 60, 60 ..."""
    seconds = 1.0
    while True:
        yield seconds
        seconds = min(2 * seconds, LONGEST_S)


async def until_written(
    write: Callable[[], T], what: str, advice: str, say: Callable[[str], None], give_up: anyio.Event | None = None
) -> T | None:
    """Call ``write`` in a thread until it succeeds, and return its result; None if it fails after ``give_up`` is set.

    Each failure is told: ``what`` is not written, the system's reason, and the ``advice``.
    """
    waited, ending = 0.0, give_up or anyio.Event()
    for seconds in pauses():
        try:
            return await to_thread.run_sync(write)
        except (OSError, Unwritable) as error:
            why = error.reason if isinstance(error, Unwritable) else reason(error)
        if ending.is_set():
            break
        say(f"{what} not written: {why}; trying again in {seconds:.0f} s ({waited:.0f} s so far). {advice}")
        waited += seconds
        with anyio.move_on_after(seconds):
            await ending.wait()
    say(f"{what} not written: {why}")
    return None


def remove(path: Path) -> None:
    """Remove a folder, or a link and the folder that it leads to."""
    if path.is_symlink():
        shutil.rmtree(path.resolve(), ignore_errors=True)
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def link(path: Path, target: Path) -> None:
    """Make ``path`` a link to ``target``, in the place of what is there."""
    aside = path.with_name(f".{path.name}.link")
    aside.unlink(missing_ok=True)
    os.symlink(target.absolute(), aside)
    remove(path)
    aside.rename(path)
