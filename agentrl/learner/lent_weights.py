"""The weights of a policy in shards, as engines read them: no process ever holds all of them.

All processes gather a layer, one of them keeps it, and they go on to the next. What the first process begins here, the
others are asked to take part in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, suppress
from itertools import chain, cycle, zip_longest
from typing import Self

from torch import Tensor

from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.sharding import ShardedPolicy
from agentrl.models.checkpoint_layers import Layer, Read, iterate_adapter, iterate_layers
from agentrl.models.lora import has_adapter
from agentrl.models.memory_file import MemoryFile, has_memory_files, write_layers
from agentrl.runtime.memory import return_freed_memory

WRITE, GATHER = "write the layers", "gather the layers"  # what the others are asked for
Ask = Callable[[object], AbstractContextManager[None]]


class Errand:
    """Something that all processes do with their shards, which the first one asks for."""

    def run(self, lent: LentWeights) -> list[str]:
        """Run this process's part; return each process's problem, or nothing."""
        raise NotImplementedError


class _Turns:
    """An iterator over files: whether this process is the ``writer`` of the next one."""

    def __init__(self, writers: int, rank: int) -> None:
        self._writers, self._rank, self.writer = cycle(range(writers)), rank, -1

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bool:
        self.writer = next(self._writers)
        return self.writer == self._rank


class LentWeights:
    """The policy's tensors by the names of its checkpoints: all of it, or its adapter.

    Args:
        ask: asks the other processes to take part in what is done inside; nothing else is asked of them meanwhile.
    """

    def __init__(self, shards: ShardedPolicy, process_group: ProcessGroup, ask: Ask) -> None:
        self.shards, self.process_group, self._ask = shards, process_group, ask
        self._held: list[MemoryFile] = []

    def describe_layers(self) -> Iterator[Layer]:
        """Yield the layers as tensors without values."""
        return self._iterate(self.shards.describe)

    def gather_layers(self) -> Generator[Layer]:
        """Yield the layers. The others gather all of them, also where this one has no use for the rest."""
        with self._ask(GATHER):
            layers = self._gather()
            with suppress(GeneratorExit):  # closed in the middle, it goes on below
                for layer in layers:  # noqa: UP028
                    yield layer
            for _ in layers:
                pass

    def write_files(self) -> list[MemoryFile]:
        """Write the layers into files in memory, by turns in each process of this machine; return all of them."""
        with self._ask(WRITE):
            return self._write()

    def run_errand(self, errand: Errand) -> list[str]:
        """Have all processes run an errand; return each one's problem, or nothing."""
        with self._ask(errand):
            return errand.run(self)

    def take_part(self, wish: str | Errand) -> None:
        """Take part, in another process, in what the first one has begun."""
        if isinstance(wish, Errand):
            wish.run(self)
            return
        if wish == WRITE:
            self._write()
            return
        for _ in self._gather():
            pass

    def _write(self) -> list[MemoryFile]:
        for file in self._held:
            file.close()
        group = self.process_group
        names = [name for layer in self.describe_layers() for name in layer]
        agree = all(other == names for other in group.all_gather(names))  # a model that was not loaded may have others
        writers = group.local_size if agree and has_memory_files() else 1  # those that the first one can open
        turns = _Turns(writers, group.rank)
        layers = self._iterate(lambda parameter: self._send(parameter, turns.writer))
        self._held = list(write_layers(layers, self.describe_layers(), turns))
        others = group.all_gather([file.path for file in self._held])[1:writers]
        by_turn = zip_longest(self._held, *([MemoryFile(path) for path in paths] for paths in others))
        return [file for file in chain.from_iterable(by_turn) if file is not None]

    def _gather(self) -> Iterator[Layer]:
        return self._iterate(lambda parameter: self._send(parameter, 0))

    def _send(self, parameter: Tensor, receiver: int) -> Tensor:
        """Send a part of a parameter; return the whole one, or one without values where it is not received."""
        whole = self.shards.send(parameter, receiver)
        return self.shards.describe(parameter) if whole is None else whole

    def _iterate(self, read: Read) -> Iterator[Layer]:
        policy = self.shards.policy
        for layer in iterate_adapter(policy, read) if has_adapter(policy) else iterate_layers(policy, read):
            yield layer
            return_freed_memory()
