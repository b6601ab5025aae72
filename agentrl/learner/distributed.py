"""The learner in several processes: ``torchrun --nproc_per_node 4 -m agentrl train ...``.

Rank 0 rolls out, and broadcasts the rows to learn from. Each rank takes its shard of the micro-batches. Their losses
are shares of one sum, whose weights were fixed for the whole step before it was divided, so gradients are summed, not
averaged. Every rank then steps its part of the policy (`agentrl.learner.sharding`), or the same whole one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from agentrl.errors import UserError
from agentrl.learner.roll_call import RollCall
from agentrl.runtime.interruption import ignore_signals

T = TypeVar("T")
TIMEOUT = timedelta(hours=24)  # rollouts may take long; who is gone is found by the roll call, and by torchrun
_LOST = ("Connection closed by peer", "Connection reset by peer", "NCCL", "Timed out waiting", "Broken pipe")


class ProcessGroup:
    """This process among the others: its rank, and the collectives of the learner. A single process needs none."""

    def __init__(self, rank: int = 0, world_size: int = 1, roll_call: RollCall | None = None) -> None:
        self.rank, self.world_size, self._roll_call = rank, world_size, roll_call

    @property
    def is_worker(self) -> bool:
        """Return True in every process but rank 0: it only learns what rank 0 broadcasts."""
        return self.rank > 0

    @property
    def local_size(self) -> int:
        """Return how many processes there are on this machine, by torchrun's word."""
        return min(int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size)), self.world_size)

    def broadcast_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Overwrite the parameters with those of rank 0."""
        for p in parameters if self.world_size > 1 else ():
            distributed.broadcast(p.data, src=0)

    def shard(self, batches: Sequence[T]) -> Sequence[T]:
        """Select this process's share."""
        return batches[self.rank :: self.world_size]

    def unshard(self, shards: Sequence[Sequence[T]]) -> list[T]:
        """Merge what every process made of its ``shard``, one entry each, into the order from before."""
        return [shards[i % self.world_size][i // self.world_size] for i in range(sum(map(len, shards)))]

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

    def broadcast(self, message: object) -> None:
        """Send a message from rank 0 to every worker, which calls `receive`."""
        if self.world_size > 1:
            distributed.broadcast_object_list([message], src=0)

    def receive(self) -> Any:
        """Wait for the next message that rank 0 broadcasts."""
        messages: list[Any] = [None]
        distributed.broadcast_object_list(messages, src=0)
        return messages[0]

    def destroy(self) -> None:
        """Leave the process group."""
        if self._roll_call is not None:
            self._roll_call.close()
        if self.world_size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


def is_restarted() -> bool:
    """Return True in a process that torchrun started again (``--max-restarts``)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextmanager
def explain_lost_processes() -> Iterator[None]:
    """Turn the error of a collective whose other side is gone into a UserError."""
    try:
        yield
    except RuntimeError as error:
        if not any(word in str(error) for word in _LOST):
            raise
        raise UserError(
            "another one of the learner's processes is gone, in the middle of a step "
            f"({str(error).strip().splitlines()[-1]:.200}); what is saved is in the run's checkpoints: "
            "agentrl train --resume RUN, or torchrun --max-restarts N begins there by itself"
        ) from None


def init_process_group(rank_timeout_s: float | None = None) -> ProcessGroup:
    """Join the process group that torchrun describes in the environment; a single process without it.

    Args:
        rank_timeout_s: how long a process may be silent before the others name it, and end.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return ProcessGroup()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank = int(os.environ["RANK"])
    if rank:
        ignore_signals()  # rank 0 decides when all end
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    roll_call = None
    if rank_timeout_s is not None:
        store: Any = distributed.distributed_c10d._get_default_store()
        roll_call = RollCall(store.clone(), rank, world_size, rank_timeout_s)  # a connection of its own
    return ProcessGroup(rank, world_size, roll_call)
