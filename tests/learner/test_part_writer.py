"""Parts of a checkpoint: written by all, or an error that names who could not. Two writers meet in torch's store."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from agentrl import UserError
from agentrl.learner import part_writer
from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.part_writer import PartCheck, PartError, PartWriter, check_parts, describe_ranks, name_part
from agentrl.models.saved_tensor import find_saved_tensors
from agentrl.training import checkpoint

WEIGHT = torch.arange(12.0).view(4, 3)


class ElsewhereStore:
    """The store as another machine sees it, where the paths of this one lead to another disk."""

    def __init__(self, store: Any, here: Path, there: Path) -> None:
        self._store, self._here, self._there = store, here, there
        self.set, self.check = store.set, store.check

    def get(self, key: str) -> bytes:
        found: bytes = self._store.get(key)
        return found.replace(str(self._here).encode(), str(self._there).encode())


@contextmanager
def opened(there: Path | None = None, here: Path = Path()) -> Iterator[list[PartWriter]]:
    """Open the writers of two processes."""
    tcp_store: Any = distributed.TCPStore  # type: ignore[attr-defined]
    master = tcp_store("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20))
    theirs: Any = master.clone() if there is None else ElsewhereStore(master.clone(), here, there)
    writers = [PartWriter(ProcessGroup(0, 2), lambda: master), PartWriter(ProcessGroup(1, 2), lambda: theirs)]
    try:
        yield writers
    finally:
        for writer in writers:
            writer.close()


def stage(writers: list[PartWriter]) -> dict[str, Any]:
    """Stage a tensor that all have in both of them: the first process writes it."""
    weight = WEIGHT.clone()
    named, _ = [writer.stage({"learner": {"weight": weight, "rows": [1, 2], "more": None}}) for writer in writers]
    weight.zero_()  # the training goes on
    return named


def test_what_is_staged_is_written_as_it_was_and_read_as_far_as_it_is_needed(tmp_path: Path) -> None:
    with opened() as writers:
        named = stage(writers)
        assert named["learner"]["rows"] == [1, 2]
        digests = writers[0].write(tmp_path)
    names = [name_part(rank, 2) for rank in range(2)]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert check_parts(ProcessGroup(), PartCheck(str(tmp_path), tuple(digests))) == [[True, True]]
    saved = find_saved_tensors([tmp_path / name for name in names])[named["learner"]["weight"].name]
    assert torch.equal(saved.read(), WEIGHT)
    assert torch.equal(saved.read_rows(1, 3), WEIGHT[1:3])
    assert saved.read_rows(4, 4).shape == (0, 3)
    part = tmp_path / names[0]
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    (tmp_path / names[1]).unlink()
    assert check_parts(ProcessGroup(), PartCheck(str(tmp_path), tuple(digests))) == [[False, None]]


def test_who_has_no_room_is_named_and_it_can_be_written_elsewhere(tmp_path: Path) -> None:
    full, free = tmp_path / "full", tmp_path / "free"
    full.mkdir()
    free.mkdir()
    (full / name_part(1, 2)).symlink_to("/dev/full")
    with opened() as writers:
        stage(writers)
        with pytest.raises(PartError, match=f"No space left on device .rank 1 on {socket.gethostname()}") as caught:
            writers[0].write(full)
        assert caught.value.errno == errno.ENOSPC
        assert len(writers[0].write(free)) == 2


def test_a_machine_with_a_disk_of_its_own_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_writer, "_SEEN_S", 0.3)
    here, none, other = tmp_path / "here", tmp_path / "none", tmp_path / "other"
    here.mkdir()
    other.mkdir()
    for there, sentence in (
        (none, f"rank 1 on .* found no '{here}'; the run folder has to be on a disk that all machines have: --run.dir"),
        (other, f"what rank 1 wrote into '{here}' is not seen here; the run folder has to be on a disk"),
    ):
        with opened(there, here) as writers:
            stage(writers)
            with pytest.raises(PartError, match=sentence):
                writers[0].write(here)


def test_who_gets_no_further_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_writer, "_SILENT_S", 0.3)
    with opened() as writers:
        writers[0].stage({"weight": WEIGHT})  # the other one never comes to it
        with pytest.raises(PartError, match="rank 1 wrote nothing for 0 s"):
            writers[0].write(tmp_path)


def test_each_state_is_written_by_itself(tmp_path: Path) -> None:
    """Also one that was staged and not written; and none of a thread is left behind."""
    with opened() as writers:
        stage(writers)
        for step in (1, 2):
            state = checkpoint.encode_state(stage(writers) | {"step": step})
            checkpoint.save(tmp_path, step, state, parts=writers[0])
        writers[0].release()
    assert not [thread for thread in threading.enumerate() if thread.name == "agentrl checkpoint"]
    step, state_of = checkpoint.load(tmp_path) or (0, {})
    assert (step, state_of["step"]) == (2, 2)
    assert torch.equal(state_of["learner"]["weight"].read(), WEIGHT)


def test_on_a_full_disk_older_checkpoints_make_room_for_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, failures = os.fsync, [True]

    def full_once(descriptor: int) -> None:
        if threading.current_thread().name == "agentrl checkpoint" and failures:
            failures.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with opened() as writers:
        for step in (1, 2):
            checkpoint.save(tmp_path, step, checkpoint.encode_state(stage(writers)), parts=writers[0])
        monkeypatch.setattr(os, "fsync", full_once)
        checkpoint.save(tmp_path, 3, checkpoint.encode_state(stage(writers)), parts=writers[0])
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000003"]
        failures += [True, True]
        with pytest.raises(PartError, match="No space left on device"):
            checkpoint.save(tmp_path, 4, checkpoint.encode_state(stage(writers)), parts=writers[0])
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]
    assert checkpoint.load(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "gone", "changed", "digest", "holes"])
def test_a_checkpoint_with_a_damaged_part_is_passed_over(damage: str, tmp_path: Path) -> None:
    with opened() as writers:
        for step in (1, 2):
            checkpoint.save(tmp_path, step, checkpoint.encode_state(stage(writers)), parts=writers[0])
    part = tmp_path / "step-000002" / name_part(0, 2)
    content = part.read_bytes()
    if damage == "cut":
        part.write_bytes(content[:-1])
    elif damage == "gone":
        part.unlink()
    elif damage == "changed":
        part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "digest":
        digest = tmp_path / "step-000002" / "digest"
        digest.write_text(digest.read_text().rpartition(" ")[0])
    else:
        os.truncate(part, 40 << 30)
        with pytest.raises(UserError, match=r"step-000002' cannot be read: shard-00001.*42,949"):
            checkpoint.load(tmp_path)
        return
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert found[0] == 1


def test_processes_are_named() -> None:
    assert describe_ranks([3]) == "rank 3"
    assert describe_ranks([5, 1, 2]) == "ranks 1, 2 and 5"
