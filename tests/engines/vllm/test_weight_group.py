"""The one group of a trainer and all workers of all servers: who is which rank, and what if one is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import multiprocessing

from agentrl.engines.vllm.rendezvous import ANYWHERE
from agentrl.engines.vllm.weight_group import GroupOver, Seat, WeightGroup, find_worker_rank, place_servers

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = 4


def workers(copies: int, cut: int) -> list[SimpleNamespace]:
    """vLLM's ParallelConfig of each worker of a server."""
    return [
        SimpleNamespace(data_parallel_index=copy, world_size=cut, rank=rank)
        for copy in range(copies)
        for rank in range(cut)
    ]


@pytest.mark.parametrize("trainers", [1, 2, 8])
def test_every_rank_is_taken_once(trainers: int) -> None:
    for servers in range(1, 5):
        for cut in range(1, 9):
            for copies in (1, 2, 3):
                shapes = [(copies, cut), (1, 1), (2, 4), (1, cut)][:servers]
                offsets, world_size = place_servers([a * b for a, b in shapes], trainers)
                ranks = [
                    find_worker_rank(parallel, offset)
                    for offset, shape in zip(offsets, shapes, strict=True)
                    for parallel in workers(*shape)
                ]
                assert [*range(trainers), *ranks] == list(range(world_size))


def member(rank: int, port: int, fate: str, answers: Any) -> None:
    """Take part in a group over gloo: of the last rank's fate hangs how it ends."""
    torch.set_num_threads(1)
    last = rank == SIZE - 1
    if last and fate == "absent":
        return
    begun = time.monotonic()
    try:
        group = WeightGroup.meet(Seat("127.0.0.1", port, rank, SIZE, 3.0 if fate == "absent" else 60.0))
        group.join("gloo")
        if last and fate in ("SIGKILL", "SIGSTOP"):
            answers.put((rank, "gone", 0.0))
            time.sleep(0.5)
            os.kill(os.getpid(), getattr(signal, fate))
        limit = 3.0 if fate == "SIGSTOP" and rank == 0 else 60.0  # the trainer's deadline is the others' word
        with group.watching(limit):
            tensor = torch.arange(200_000.0) if rank == 0 else torch.zeros(200_000)
            for _ in range(20_000 if fate else 5):
                group.broadcast(tensor, src=0)
        assert torch.equal(tensor, torch.arange(200_000.0))
        answers.put((rank, "sent", time.monotonic() - begun))
        if rank == 0:
            time.sleep(1.0)  # the store is the trainer's
        group.close()
    except GroupOver as over:
        answers.put((rank, f"over: {over}", time.monotonic() - begun))


def run(fate: str) -> dict[int, tuple[str, float]]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with ANYWHERE.reserve("http://127.0.0.1:1") as (_, port):
        pass
    processes = [context.Process(target=member, args=(rank, port, fate, answers)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    try:
        expected = SIZE - (fate == "absent")
        found = [answers.get(timeout=120) for _ in range(expected)]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {rank: (word, seconds) for rank, word, seconds in found}


def test_one_broadcast_reaches_everybody() -> None:
    assert {word for word, _ in run("").values()} == {"sent"}


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["SIGKILL", "SIGSTOP"])
def test_a_member_that_is_gone_holds_nobody(fate: str) -> None:
    found = run(fate)
    assert found.pop(SIZE - 1)[0] == "gone"
    assert all(word.startswith("over: ") for word, _ in found.values()), found
    assert max(seconds for _, seconds in found.values()) < 50, "nobody's own deadline"


@pytest.mark.slow
def test_a_member_that_does_not_come_is_named() -> None:
    found = run("absent")
    assert "rank 3 is not there after 3 s" in found[0][0]
    assert all(word.startswith("over: ") for word, _ in found.values())


class Blocking:
    """A communicator in which nobody answers, as NCCL is where a peer is gone."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert self.aborted.wait(60)

    def destroy(self) -> None:
        self.aborted.set()


class Store(dict[str, bytes]):
    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


def test_a_communicator_that_blocks_is_aborted_at_the_deadline_and_the_others_hear_of_it() -> None:
    store, blocking = Store(), Blocking()
    group = WeightGroup(store, Seat("", 0, 0, 2, 1.0))
    group.adopt(blocking)
    begun = time.monotonic()
    with pytest.raises(GroupOver, match=r"it took more than 0.3 s"), group.watching(0.3):
        group.broadcast(torch.zeros(1), src=0)
    assert time.monotonic() - begun < 20
    assert blocking.aborted.is_set()
    other, waiting = WeightGroup(store, Seat("", 0, 1, 2, 1.0)), Blocking()
    other.adopt(waiting)
    with pytest.raises(GroupOver, match="it took more than"), other.watching(60):
        other.broadcast(torch.zeros(1), src=0)
    assert waiting.aborted.is_set()


def test_a_problem_of_ones_own_is_not_the_groups() -> None:
    group = WeightGroup(Store(), Seat("", 0, 0, 2, 1.0))
    with pytest.raises(KeyError), group.watching(60):
        raise KeyError("a layer")
    with pytest.raises(GroupOver, match="a layer"), group.watching(60):
        pass
