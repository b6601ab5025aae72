"""A file of safetensors, looked at before it is read: what its header says, against the file itself."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

from agentrl.settings.documents import open_regular, parse_json

_HEADER_BYTES = 16 << 20
_DIMENSIONS, _INTEGERS = 64, range(1 << 63)  # of a shape: else their product takes minutes
_SPARSE = 16  # a file that holds so many times what is on the disk is holes; one that is compressed is not
_SMALL = 64 << 20  # nobody minds


class StoredTensor(NamedTuple):
    """A tensor of a file: its name, its type by safetensors' name, and the number of its elements."""

    name: str
    dtype: str
    elements: int


def read_header(path: Path) -> list[StoredTensor]:
    """Read what a file holds, and nothing of the numbers.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no file of safetensors, or another one than its header says.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _HEADER_BYTES:
            raise ValueError(f"{path.name} is no file of safetensors")
        header = parse_json(file.read(length).decode("utf-8"))
        stored = os.fstat(file.fileno()).st_size - 8 - length
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} is no file of safetensors")
    header.pop("__metadata__", None)
    tensors, taken = [], 0
    for name, entry in header.items():
        try:
            begin, end = entry["data_offsets"]
            elements = _count_elements(entry["shape"])
            if not 0 <= begin <= end <= stored or not 0 <= elements <= 8 * (end - begin):
                raise ValueError(f"{path.name}: tensor {name:.80} is not in the file")
        except (KeyError, TypeError):
            raise ValueError(f"{path.name} is no file of safetensors") from None
        taken += end - begin
        tensors.append(StoredTensor(name, str(entry.get("dtype")), elements))
    if taken != stored:
        raise ValueError(f"{path.name}: its tensors take {taken:,} bytes, and it holds {stored:,}")
    return tensors


def _count_elements(shape: list[int]) -> int:
    if len(shape) > _DIMENSIONS or not all(isinstance(n, int) and n in _INTEGERS for n in shape):
        raise TypeError(shape)
    return math.prod(shape)


def check_room(path: Path, most: int | None = None) -> None:
    """Look whether a file is as large as it says, by what the file system tells.

    Args:
        most: bytes that it may have; what this machine's memory has by default.

    Raises:
        OSError: it cannot be looked at.
        ValueError: it is mostly holes, which a small download can have without end, or there is no room for it.
    """
    found = path.stat()
    held = found.st_blocks * 512  # 0 where it is not known
    if held and found.st_size > max(_SMALL, _SPARSE * held):
        raise ValueError(f"{path.name} says that it has {found.st_size:,} bytes, and {held:,} are on the disk")
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if most is None else most
    if found.st_size > most:
        raise ValueError(f"{path.name} has {found.st_size:,} bytes, and this machine's memory {most:,}")
