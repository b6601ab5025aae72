"""The group of a trainer and the workers of all its servers, in which one broadcast reaches everybody.

Rank 0 is the trainer, and the workers of each server follow, in the servers' order. They meet at a store of the
trainer's. Nobody goes on before all have come, and whoever gives the group up tells the others there: what waits for a
member that is gone ends, on both sides, and another group can be made of the rest.

    nccl   vLLM's communicator: GPUs
    gloo   the same over torch's for the CPU, which the tests run
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor

_c10d: Any = torch.distributed  # parts of it are exported, and not declared
POLL_S = 0.1
HERE, GO, OVER, NCCL_ID = "agentrl/here", "agentrl/go", "agentrl/over", "agentrl/nccl"


class GroupOver(RuntimeError):
    """The group was given up: somebody is gone, or took too long."""


class Communicator(Protocol):
    """The carrier of the tensors: vLLM's ``PyNcclCommunicator``, or the one for the CPU."""

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None: ...
    def destroy(self) -> None: ...


@dataclass(frozen=True)
class Seat:
    """A member's place in a group, and how long it waits for the others."""

    address: str
    port: int
    rank: int
    world_size: int
    timeout_s: float


def place_servers(workers: Sequence[int], trainers: int = 1) -> tuple[list[int], int]:
    """Place servers of so many workers each behind the trainer's ranks.

    Returns:
        The rank of each server's first worker (vLLM's ``rank_offset``), and the size of the group.
    """
    *offsets, world_size = accumulate(workers, initial=trainers)
    return offsets, world_size


def find_worker_rank(parallel: Any, rank_offset: int) -> int:
    """Find a worker's rank by vLLM's ``ParallelConfig``: copies of the model one after the other."""
    return int(rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank)


class WeightGroup:
    """A group that a member belongs to from `join` on."""

    def __init__(self, store: Any, seat: Seat) -> None:
        self.seat = seat
        self.communicator: Communicator = _NoCommunicator()
        self._store, self._reason = store, ""
        self._lock = threading.Lock()

    @classmethod
    def meet(cls, seat: Seat) -> WeightGroup:
        """Open the store, which is the trainer's, or connect to it."""
        limit = timedelta(seconds=seat.timeout_s)
        options: dict[str, Any] = {"world_size": seat.world_size, "wait_for_workers": False, "timeout": limit}
        if seat.rank == 0:
            options["master_listen_fd"] = _listen(seat.address, seat.port)
        return cls(_c10d.TCPStore(seat.address, seat.port, is_master=seat.rank == 0, **options), seat)

    def join(self, kind: str) -> None:
        """Wait until all members have come, and connect to them.

        Raises:
            GroupOver: somebody has not come in time, or the group is given up.
        """
        seat, begun = self.seat, time.monotonic()
        self._store.set(f"{HERE}/{seat.rank}", "1")
        wanted = [f"{HERE}/{rank}" for rank in range(seat.world_size)] if seat.rank == 0 else [GO]
        while not self._check(wanted):
            if reason := self._find_reason():
                raise GroupOver(reason)
            if time.monotonic() - begun > seat.timeout_s:
                self.give_up(f"{self._name_absent()} not there after {seat.timeout_s:.3g} s")
            time.sleep(POLL_S / 10)
        if seat.rank == 0:
            self._store.set(GO, "1")
        with self.watching(seat.timeout_s):
            communicator = _COMMUNICATORS[kind](self._store, seat)
            with self._lock:
                self.communicator = communicator
                if self._reason:
                    communicator.destroy()

    def adopt(self, communicator: Communicator) -> None:
        """Take a communicator that the members have made already."""
        self.communicator = communicator

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Broadcast a tensor in place, for vLLM's senders and receivers.

        Raises:
            GroupOver: a member is gone, or the group is given up.
        """
        try:
            self.communicator.broadcast(tensor, src, stream)
        except RuntimeError as error:
            raise GroupOver(str(error).splitlines()[0][:200]) from error

    @contextmanager
    def watching(self, seconds: float) -> Iterator[None]:
        """Give the group up where the block takes longer, or where another member has given it up.

        Raises:
            GroupOver: it is given up.
        """
        done = threading.Event()
        thread = Thread(target=self._watch, args=(done, seconds), name="agentrl weight group", daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            if self._reason:
                raise GroupOver(self._reason) from error
            self.give_up(str(error) or type(error).__name__)
            raise
        finally:
            done.set()
        thread.join(5 * POLL_S)
        if self._reason:
            raise GroupOver(self._reason)

    def give_up(self, reason: str) -> None:
        """Give the group up for all members; what waits in it ends."""
        with self._lock:
            if self._reason:
                return
            self._reason = reason or "given up"
        with suppress(RuntimeError):  # the store is gone, and the others see that
            self._store.set(OVER, self._reason)
        self.communicator.destroy()

    def close(self) -> None:
        """Leave a group that nobody waits in."""
        self.give_up("closed")

    def _watch(self, done: threading.Event, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not done.wait(POLL_S):
            reason = self._find_reason() or ("" if time.monotonic() < limit else f"it took more than {seconds:.3g} s")
            if reason:
                self.give_up(reason)
                return

    def _find_reason(self) -> str:
        """Find why the group is over; nothing while it is not."""
        if self._reason:
            return self._reason
        try:
            return self._store.get(OVER).decode() if self._store.check([OVER]) else ""
        except RuntimeError:
            return "the trainer is gone"

    def _check(self, keys: list[str]) -> bool:
        try:
            return bool(self._store.check(keys))
        except RuntimeError:
            return False  # the trainer is gone: found below

    def _name_absent(self) -> str:
        if self.seat.rank:
            return "the others are"
        absent = [str(r) for r in range(self.seat.world_size) if not self._check([f"{HERE}/{r}"])]
        return f"{'rank' if len(absent) == 1 else 'ranks'} {', '.join(absent)} {'is' if len(absent) == 1 else 'are'}"


class _NoCommunicator:
    """The communicator of a group that nobody has joined."""

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        raise GroupOver("nobody has joined it")

    def destroy(self) -> None: ...


class _GlooCommunicator:
    """The twin of vLLM's ``PyNcclCommunicator`` on the CPU: what the engines of weight transfer ask of it."""

    def __init__(self, store: Any, seat: Seat) -> None:
        self.rank, self.world_size, self.device = seat.rank, seat.world_size, torch.device("cpu")
        limit = timedelta(seconds=seat.timeout_s)
        prefixed = _c10d.PrefixStore("agentrl/gloo", store)
        self._groups: list[Any] = [_c10d.ProcessGroupGloo(prefixed, seat.rank, seat.world_size, limit)]
        self._over = threading.Event()

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        options = _c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        if not self._groups:
            raise GroupOver("given up before a broadcast")
        work = self._groups[0].broadcast([tensor.view(-1).view(torch.uint8)], options)
        while not work.is_completed():
            if self._over.is_set():
                raise GroupOver("given up in the middle of a broadcast")
            time.sleep(0.0002)
        work.wait()

    def destroy(self) -> None:
        self._over.set()
        groups, self._groups = self._groups, []
        Thread(target=groups.clear, name="agentrl gloo", daemon=True).start()  # it waits for what is under way


def _connect_nccl(store: Any, seat: Seat) -> Communicator:
    """Connect vLLM's communicator on this thread's GPU. NCCL's id goes by the store, and not as a pickle."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    if seat.rank == 0:
        store.set(NCCL_ID, bytes(NCCLLibrary().ncclGetUniqueId().internal).hex())
    identity = bytes.fromhex(store.get(NCCL_ID).decode())
    device = torch.accelerator.current_device_index()
    communicator: Communicator = uid_init_process_group(identity, seat.rank, seat.world_size, device)
    return communicator


_COMMUNICATORS = {"nccl": _connect_nccl, "gloo": _GlooCommunicator}


def _listen(address: str, port: int) -> int:
    """Listen at an address that may be reserved (`rendezvous`); return the socket's descriptor."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen()
    return listener.detach()
