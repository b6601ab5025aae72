"""A safetensors file in memory, without a name: it is gone with the process that holds it, whatever ends that.

Another process of this machine opens it by its path, while it is held.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Self

from torch import Tensor

from agentrl.models.checkpoint_layers import Layer, group_by_size, merge_layers
from agentrl.models.tensor_file import write_tensors

PART_BYTES = 64 << 20  # of tensors in a file, or one layer


@dataclass
class MemoryFile:
    """A file, by its path; or its content, where the system has no files in memory."""

    path: str | None = None
    _descriptor: int | None = None  # where this process holds it
    _bytes: bytes = b""

    @classmethod
    def write(cls, tensors: Mapping[str, Tensor], parts: Iterable[Layer] | None = None) -> Self:
        """Write tensors into a new file, one after the other; ``parts`` as in `write_tensors`."""
        descriptor = open_memory_file()
        if descriptor is None:
            content = io.BytesIO()
            write_tensors(content, tensors, parts)
            return cls(_bytes=content.getvalue())
        with open(descriptor, "wb", closefd=False) as file:
            write_tensors(file, tensors, parts)
        return cls(f"/proc/{os.getpid()}/fd/{descriptor}", descriptor)

    def read(self) -> bytes:
        """Return the whole file."""
        return self._bytes if self.path is None else Path(self.path).read_bytes()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None


def has_memory_files() -> bool:
    """Return True where the system has files in memory."""
    return hasattr(os, "memfd_create")


def open_memory_file() -> int | None:
    """Open a file without a name in memory; None if the system has no such files."""
    return os.memfd_create("agentrl weights") if has_memory_files() else None


def write_layers(layers: Iterator[Layer], described: Iterable[Layer], turns: Iterator[bool]) -> Iterator[MemoryFile]:
    """Write layers into files of about ``PART_BYTES``, one after the other; without a turn, let them go.

    Args:
        described: the same layers, of tensors without values.
        turns: whether this process writes the next file.
    """
    for group in group_by_size(described, PART_BYTES):
        if next(turns):
            yield MemoryFile.write(merge_layers(group), islice(layers, len(group)))
        else:
            deque(islice(layers, len(group)), maxlen=0)
