"""The learner in several processes: ``torchrun --nproc_per_node 4 -m agentrl train ...``.

Rank 0 rolls out, plans the micro-batches, and sends each rank the rows of its shard of them
(`agentrl.learner.row_exchange`). Their losses are shares of one sum, whose weights were fixed for the whole step before
it was divided, so gradients are summed, not averaged. Every rank then steps its part of the policy
(`agentrl.learner.sharding`), or the same whole one.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.rendezvous import rendezvous

from agentrl.errors import ProcessLostError
from agentrl.learner.attempt_store import agree_on_attempt
from agentrl.learner.roll_call import FAILED, RankPlace, RollCall, SharedStore
from agentrl.runtime.interruption import ignore_signals

T = TypeVar("T")
JOIN_S, LONGEST_JOIN_S = 60.0, 1800.0  # until all processes have started: imports take some longer than others
TIMEOUT = timedelta(hours=24)  # rollouts may take long; who is gone is found by the roll call, and by torchrun
_LOST = ("Connection closed by peer", "Connection reset by peer", "NCCL", "Timed out waiting", "Broken pipe")


class ProcessGroup:
    """This process among the others: its rank, and the collectives of the learner. A single process needs none."""

    def __init__(self, rank: int = 0, world_size: int = 1, roll_call: RollCall | None = None) -> None:
        self.rank, self.world_size, self._roll_call = rank, world_size, roll_call
        self.numbers = itertools.count(1)  # of what all processes do, one after the other
        self._takes_part = False
        self._failure: BaseException | None = None  # that ended this process's part of something before its end

    @property
    def is_worker(self) -> bool:
        """Return True in every process but rank 0: it only learns what rank 0 broadcasts."""
        return self.rank > 0

    @property
    def local_size(self) -> int:
        """Return how many processes there are on this machine, by torchrun's word."""
        return min(int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)), self.world_size)

    def list_places(self) -> dict[int, RankPlace]:
        """List where each process is by the roll call; nothing for a single one."""
        return {} if self._roll_call is None else self._roll_call.list_places()

    @property
    def is_in_step(self) -> bool:
        """Return True unless this process is in the middle of something with the others, or did not come to its end."""
        return not self._takes_part

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Let the others know where this thread is while it takes part in something with them.

        Raises:
            BaseException: the one that ended this process's part of something earlier: the others still wait in that.
        """
        if self.world_size == 1:
            yield
            return
        if self._failure is not None:
            raise self._failure
        self._takes_part = True
        if self._roll_call is not None:
            self._roll_call.worker = threading.get_ident()
        try:
            yield
        except BaseException as error:
            self._failure = error
            raise
        finally:
            if self._roll_call is not None:
                self._roll_call.worker = None
        self._takes_part = False

    def broadcast_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Overwrite the parameters with those of rank 0."""
        for p in parameters if self.world_size > 1 else ():
            distributed.broadcast(p.data, src=0)

    def shard(self, batches: Sequence[T], rank: int | None = None) -> Sequence[T]:
        """Select the share of a process; of this one by default."""
        return batches[self.rank if rank is None else rank :: self.world_size]

    def all_reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of the trained parameters over all processes. A missing gradient counts as zeros."""
        if self.world_size == 1:
            return
        trained = [p for p in parameters if p.requires_grad]
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            distributed.all_reduce(p.grad)

    def all_gather(self, mine: T) -> list[T]:
        """Gather ``mine`` from every process, in rank order."""
        if self.world_size == 1:
            return [mine]
        gathered: list[T] = [mine] * self.world_size
        distributed.all_gather_object(gathered, mine)
        return gathered

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Gather a tensor of the host from every process, in rank order, to rank 0; the others get an empty list.

        Their first dimensions may differ.
        """
        lengths = self.all_gather(len(mine))
        if self.is_worker:
            self.send([mine], 0)
            return []
        gathered = [mine, *(mine.new_empty(n, *mine.shape[1:]) for n in lengths[1:])]
        for rank, tensor in enumerate(gathered[1:], start=1):
            self.receive_from(rank, [tensor])
        return gathered

    def send(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Send tensors of the host to another process, which calls `receive_from`."""
        for tensor in tensors:
            if tensor.numel():
                distributed.send(tensor.contiguous(), rank)

    def receive_from(self, rank: int, tensors: Sequence[Tensor]) -> None:
        """Fill tensors of the host with those that another process sends."""
        for tensor in tensors:
            if tensor.numel():
                distributed.recv(tensor, rank)

    def broadcast(self, message: object) -> None:
        """Send a message from rank 0 to every worker, which calls `receive`."""
        if self.world_size > 1:
            distributed.broadcast_object_list([message], src=0)

    def receive(self) -> Any:
        """Wait for the next message that rank 0 broadcasts."""
        messages: list[Any] = [None]
        distributed.broadcast_object_list(messages, src=0)
        return messages[0]

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Leave the process group when the block ends.

        After an error of which the others do not know, the connections end with the process: to close them might wait
        for the others, who wait for this one; and who hears of their end first might have this process killed before
        it has told its error.
        """
        try:
            yield
        except BaseException as error:
            if self.is_in_step and (not self.is_worker or isinstance(error, SystemExit)):  # all know of it
                self.destroy()
            elif self._roll_call is not None:  # whose error is that another one is gone is not the one to name
                self._roll_call.close("" if isinstance(error, ProcessLostError) else FAILED)
            raise
        self.destroy()

    def destroy(self) -> None:
        """Leave the process group."""
        if self._roll_call is not None:
            self._roll_call.close()
        if self.world_size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


def connect_store() -> SharedStore:
    """Connect to the store that the processes share: a connection of its own, for another thread."""
    store: Any = distributed.distributed_c10d._get_default_store()
    connection: SharedStore = store.clone()
    return connection


def is_restarted() -> bool:
    """Return True in a process that torchrun started again (``--max-restarts``)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextmanager
def explain_lost_processes() -> Iterator[None]:
    """Turn the error of a collective whose other side is gone into a ProcessLostError."""
    try:
        yield
    except RuntimeError as error:
        if not any(word in str(error) for word in _LOST):
            raise
        raise ProcessLostError(
            "another one of the learner's processes is gone, in the middle of a step "
            f"({str(error).strip().splitlines()[-1]:.200}); what is saved is in the run's checkpoints: "
            "agentrl train --resume RUN, or torchrun --max-restarts N begins there by itself"
        ) from None


def init_process_group(rank_timeout_s: float | None = None) -> ProcessGroup:
    """Join the process group that torchrun describes in the environment; a single process without it.

    Args:
        rank_timeout_s: how long a process may be silent before the others name it, and end; and, if that is longer
            than a minute, how long it may take to start.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return ProcessGroup()
    cuda = torch.cuda.is_available()
    if cuda:
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local_rank if torch.cuda.device_count() > 1 else 0)  # some launchers show each its own
    rank = int(os.environ["RANK"])
    if rank:
        ignore_signals()  # rank 0 decides when all end
    join_s = LONGEST_JOIN_S if rank_timeout_s is None else max(JOIN_S, rank_timeout_s)
    shared, *_ = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=join_s)))
    word = agree_on_attempt(shared, rank, world_size, join_s)
    store: Any = distributed.distributed_c10d.PrefixStore(f"agentrl/{word}", shared)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    roll_call = None
    if rank_timeout_s is not None:
        own = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # not that of torchrun
        roll_call = RollCall(connect_store(), rank, world_size, rank_timeout_s, is_store_of_first=own)
    return ProcessGroup(rank, world_size, roll_call)
