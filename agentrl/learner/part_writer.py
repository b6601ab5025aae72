"""A checkpoint of a learner in shards: every process writes its own part of it, while the training goes on.

The parts are copied while the loop waits (`agentrl.learner.sharded_state`). Then a thread of each process writes, where
and when the first process says by torch's store: no collective is issued from two threads. Who has written says so
there, or why it could not; the first process waits for all. A part is a file of safetensors:

shard-00001-of-00004.safetensors    the pieces of the first process; at which rows they begin is in its metadata
"""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.learner.distributed import ProcessGroup, connect_store
from agentrl.learner.roll_call import SharedStore
from agentrl.learner.sharded_state import StagedPieces
from agentrl.models.saved_tensor import describe_pieces
from agentrl.models.tensor_file import write_tensors
from agentrl.settings.documents import open_regular

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_POLL_S = 0.05
_SEEN_S = 20.0  # a file that another machine wrote may be seen that much later
_SILENT_S, _HURRIED_S = 300.0, 10.0  # until who gets no further is given up; and where the run ends by an error
_CHUNK, _SYNCED = 16 << 20, 256 << 20  # bytes that are written at once, and until they are on the disk
_SHARED = "the run folder has to be on a disk that all machines have: --run.dir DIR, on one that is shared"


class PartError(OSError):
    """The error of processes that could not write; ``strerror`` names them."""


@dataclass(frozen=True)
class _PartReport:
    """The word of a process on its part: how far it is, its checksum at the end, or the system's error."""

    number: int  # of what was staged
    attempt: int
    size: int = 0
    digest: str = ""
    errno: int = 0
    why: str = ""
    host: str = ""

    @property
    def is_last(self) -> bool:
        return bool(self.digest or self.errno)


class _Order(NamedTuple):
    """The word of the first process: where to write what was staged; an empty folder lets go of it."""

    number: int
    attempt: int
    folder: str = ""


class PartWriter:
    """Stages this process's part of a state, and writes it. The first process says where, and waits for all.

    Args:
        connect: connects to the store of the processes, once it is needed.
    """

    def __init__(self, process_group: ProcessGroup, connect: Callable[[], SharedStore] = connect_store) -> None:
        self._rank, self._world_size, self._connect = process_group.rank, process_group.world_size, connect
        self._numbers = process_group.numbers
        self._store: SharedStore | None = None
        self._pieces = StagedPieces(self._rank)
        self._number = self._attempt = 0
        self._thread: threading.Thread | None = None
        self._closed, self._hurried = threading.Event(), threading.Event()

    def stage(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Copy this process's part of a state; return it with names for its tensors. Every process takes part."""
        self._finish()
        self._store = self._store or self._connect()
        self._number, self._attempt, self._pieces = next(self._numbers), 0, StagedPieces(self._rank)
        named = {key: self._pieces.stage(value, key) for key, value in state.items()}
        if self._rank:
            self._thread = threading.Thread(target=self._serve, name="agentrl checkpoint", daemon=True)
            self._thread.start()
        return named

    def write(self, folder: Path) -> list[str]:
        """Have every process write its part into a folder; return the checksums, in rank order. Again after an error.

        Raises:
            PartError: some could not.
        """
        attempt, self._attempt = self._attempt, self._attempt + 1
        self._say("order", _Order(self._number, attempt, str(folder.absolute()))._asdict())
        own = self._try_to_write(attempt, folder)
        reports = [own, *self._await_reports(attempt)]
        _raise_errors(reports, folder)
        self._await_files(reports, folder)
        return [report.digest for report in reports]

    def release(self) -> None:
        """Let go of what is staged, here and in the other processes."""
        self._pieces = StagedPieces(self._rank)
        if self._store is not None and not self._rank:
            self._say("order", _Order(self._number, self._attempt)._asdict())

    def hurry(self) -> None:
        """Wait no longer than seconds for a process that gets no further: the run ends by an error."""
        self._hurried.set()

    def close(self) -> None:
        """Stop writing: whoever asked for it is gone."""
        self._closed.set()
        self._finish()

    def _finish(self) -> None:
        if self._rank == 0:
            self.release()
        elif self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        """Write wherever the first process says, until it lets go of what is staged."""
        number, attempt = self._number, 0
        try:
            while folder := self._await_order(number, attempt):
                self._say(self._rank, asdict(self._try_to_write(attempt, Path(folder))))
                attempt += 1
        except OSError:
            pass  # the store is gone, and torchrun ends everybody
        self._pieces = StagedPieces(self._rank)

    def _await_order(self, number: int, attempt: int) -> str:
        while not self._closed.wait(_POLL_S):
            order = _Order(**(self._hear("order") or _Order(0, 0)._asdict()))
            if order[:2] == (number, attempt):
                return order.folder
            if order[:2] > (number, attempt):
                break
        return ""

    def _try_to_write(self, attempt: int, folder: Path) -> _PartReport:
        report = _PartReport(self._number, attempt)
        path, tell = folder / name_part(self._rank, self._world_size), partial(self._tell, report)
        try:
            with _retry(lambda: _PartFile(path, tell), self._closed) as file:
                metadata = describe_pieces(self._pieces.first_rows)
                write_tensors(file, self._pieces.tensors, metadata=metadata)
                file.sync()
                return replace(report, size=file.size, digest=file.digest)
        except OSError as error:
            code, why = error.errno or errno.EIO, error.strerror or str(error)
        except Exception as error:  # the first process is to hear of it, whatever it is
            code, why = errno.EIO, f"{type(error).__name__}: {error}"
        return replace(report, errno=code, why=why, host=socket.gethostname())

    def _tell(self, report: _PartReport, size: int) -> None:
        if self._closed.is_set():
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        self._say(self._rank, asdict(replace(report, size=size)))

    def _await_reports(self, attempt: int) -> list[_PartReport]:
        """Wait for the last word of every other process. Raises PartError: one gets no further."""
        now, none = time.monotonic(), _PartReport(self._number, attempt)
        heard = dict.fromkeys(range(1, self._world_size), (none, now))
        while not all(report.is_last for report, _ in heard.values()):
            time.sleep(_POLL_S)
            now = time.monotonic()
            for rank in [rank for rank, (report, _) in heard.items() if not report.is_last]:
                report = _PartReport(**(self._hear(rank) or asdict(none)))
                if (report.number, report.attempt) == (self._number, attempt) and report != heard[rank][0]:
                    heard[rank] = report, now
            patience = _HURRIED_S if self._hurried.is_set() else _SILENT_S
            late = [rank for rank, (report, at) in heard.items() if not report.is_last and now - at > patience]
            if late:
                raise PartError(errno.ETIMEDOUT, f"{describe_ranks(late)} wrote nothing for {patience:.0f} s")
        return [report for report, _ in heard.values()]

    def _await_files(self, reports: Iterable[_PartReport], folder: Path) -> None:
        """Wait until the parts are seen here as they were written. Raises PartError: they are on another disk."""
        until, unseen = time.monotonic() + _SEEN_S, dict(enumerate(reports))
        while unseen:
            for rank, report in list(unseen.items()):
                path = folder / name_part(rank, self._world_size)
                if path.is_file() and path.stat().st_size == report.size:
                    del unseen[rank]
            if unseen and time.monotonic() > until:
                what = f"what {describe_ranks(unseen)} wrote into {str(folder)!r} is not seen here"
                raise PartError(errno.ENOENT, f"{what}; {_SHARED}")
            time.sleep(_POLL_S if unseen else 0.0)

    def _say(self, who: object, words: Mapping[str, Any]) -> None:
        assert self._store is not None
        try:
            self._store.set(f"agentrl/part/{who}", json.dumps(words))
        except RuntimeError as error:
            raise PartError(errno.ECONNABORTED, f"the store of the processes is gone: {error}") from None

    def _hear(self, who: object) -> dict[str, Any] | None:
        assert self._store is not None
        key = f"agentrl/part/{who}"
        try:
            words: dict[str, Any] | None = json.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError as error:
            raise PartError(errno.ECONNABORTED, f"the store of the processes is gone: {error}") from None
        return words


class _PartFile(io.FileIO):
    """A file that is hashed as it is written, and comes to the disk on the way: `tell_size` hears how far it is."""

    def __init__(self, path: Path, tell_size: Callable[[int], None]) -> None:
        super().__init__(path, "wb")
        self.size, self._synced, self._tell_size, self._hash = 0, 0, tell_size, sha256()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data)
        for begin in range(0, len(view), _CHUNK):
            chunk = view[begin : begin + _CHUNK]
            self._hash.update(chunk)
            self.size += len(chunk)
            while len(chunk):
                chunk = chunk[super().write(chunk) :]
            if self.size - self._synced >= _SYNCED:
                self.sync()
        return len(view)

    def sync(self) -> None:
        """Have all that is written on the disk."""
        os.fsync(self.fileno())
        self._synced = self.size
        self._tell_size(self.size)


def _retry(open_file: Callable[[], _PartFile], closed: threading.Event) -> _PartFile:
    """Open a file in a folder that another machine has made just now."""
    until = time.monotonic() + _SEEN_S
    while True:
        try:
            return open_file()
        except FileNotFoundError:
            if time.monotonic() > until or closed.wait(_POLL_S):
                raise


def _raise_errors(reports: Iterable[_PartReport], folder: Path) -> None:
    """Raise PartError if a process could not write: that of the most serious error, with all who have it."""
    failed = {rank: report for rank, report in enumerate(reports) if report.errno}
    if not failed:
        return
    codes = {report.errno for report in failed.values()}
    code = errno.ENOENT if errno.ENOENT in codes else min(codes)
    ranks = {rank: report for rank, report in failed.items() if report.errno == code}
    who = f"{describe_ranks(ranks)} on {' and '.join(sorted({report.host for report in ranks.values()}))}"
    if code == errno.ENOENT:
        raise PartError(code, f"{who} found no {str(folder)!r}; {_SHARED}")
    raise PartError(code, f"{next(iter(ranks.values())).why} ({who})")


def name_part(rank: int, world_size: int) -> str:
    """Return the name of a process's file."""
    return f"shard-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def describe_ranks(ranks: Collection[int]) -> str:
    """Name processes: rank 3; ranks 1, 2 and 5."""
    *others, last = map(str, sorted(ranks))
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


class PartCheck(NamedTuple):
    """A question of the first process, before there is a learner: are the parts in a folder what was written."""

    folder: str
    digests: tuple[str, ...]


def check_parts(process_group: ProcessGroup, check: PartCheck) -> list[list[bool | None]]:
    """Compare the checksums of parts with their files, each process a share of them; all of them have to.

    Returns:
        Of each process, for each of its share: it is right; it is not; None: the process finds no such file.
    """
    share = process_group.shard(list(enumerate(check.digests)))
    count = len(check.digests)
    return process_group.all_gather([_matches(Path(check.folder) / name_part(i, count), digest) for i, digest in share])


def _matches(path: Path, digest: str) -> bool | None:
    try:
        with open_regular(path) as file:
            return file_digest(file, "sha256").hexdigest() == digest
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return False
