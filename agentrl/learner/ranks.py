"""The learner in several processes: ``torchrun --nproc_per_node 4 -m agentrl train ...``.

The first one plays, and tells the others which rows to learn from; each takes its share of the micro-batches. Their
losses are shares of one sum, whose weights were fixed for the whole step before it was divided, so that gradients just
add up. Every process then makes the same step: the copies of the policy stay the same, bit by bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed, nn

from agentrl.interruption import ignore_signals

T = TypeVar("T")
PATIENCE = timedelta(hours=24)  # rollouts may take long; torchrun ends everybody where one process dies


class Ranks:
    """This process among the others. Alone it does nothing."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    @property
    def follows(self) -> bool:
        return self.rank > 0

    def agree(self, parameters: Iterable[nn.Parameter]) -> None:
        """All begin with the first process's."""
        for p in parameters if self.world > 1 else ():
            distributed.broadcast(p.data, src=0)

    def own(self, batches: Sequence[T]) -> Sequence[T]:
        """This process's share."""
        return batches[self.rank :: self.world]

    def put_together(self, shares: Sequence[Sequence[T]]) -> list[T]:
        """All, from what every process made of its ``own``, in the order of before."""
        return [shares[i % self.world][i // self.world] for i in range(sum(map(len, shares)))]

    def add_up(self, parameters: Iterable[nn.Parameter]) -> None:
        """Every gradient becomes the sum of all processes' own."""
        if self.world == 1:
            return
        trained = [p for p in parameters if p.requires_grad]
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            distributed.all_reduce(p.grad)

    def gathered(self, mine: T) -> list[T]:
        """Everybody's, in order."""
        if self.world == 1:
            return [mine]
        found: list[Any] = [None] * self.world
        distributed.all_gather_object(found, mine)
        return found

    def tell(self, what: Any) -> None:
        """To those that follow."""
        if self.world > 1:
            distributed.broadcast_object_list([what], src=0)

    def heard(self) -> Any:
        told = [None]
        distributed.broadcast_object_list(told, src=0)
        return told[0]

    def leave(self) -> None:
        if self.world > 1 and distributed.is_initialized():
            distributed.destroy_process_group()


def joined() -> Ranks:
    """As torchrun has set the environment; alone without it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Ranks()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank = int(os.environ["RANK"])
    if rank:
        ignore_signals()  # the first process decides when all end
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
    return Ranks(rank, world)
