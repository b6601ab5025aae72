"""The learner in several processes: ``torchrun --nproc_per_node 4 -m agentrl train ...``.

Rank 0 rolls out, and broadcasts the rows to learn from. Each rank takes its shard of the micro-batches. Their losses
are shares of one sum, whose weights were fixed for the whole step before it was divided, so gradients are summed, not
averaged. Every rank then makes the same optimizer step: the copies of the policy stay the same, bit by bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from agentrl.runtime.interruption import ignore_signals

T = TypeVar("T")
TIMEOUT = timedelta(hours=24)  # rollouts may take long; torchrun ends every process where one dies


class ProcessGroup:
    """This process among the others: its rank, and the collectives of the learner. A single process needs none."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

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
        if self.world_size > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


def init_process_group() -> ProcessGroup:
    """Join the process group that torchrun describes in the environment; a single process without it."""
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
    return ProcessGroup(rank, world_size)
