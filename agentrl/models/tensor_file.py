"""A file of safetensors, looked at before it is read (what its header says, against the file itself), and written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from agentrl.settings.documents import open_regular, parse_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
    header, _, stored = load_header(path)
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


def load_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Load a header as it is, the byte at which the tensors begin, and how many there are. Raises as above."""
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _HEADER_BYTES:
            raise ValueError(f"{path.name} is no file of safetensors")
        header = parse_json(file.read(length).decode("utf-8"))
        stored = os.fstat(file.fileno()).st_size - 8 - length
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} is no file of safetensors")
    return header, 8 + length, stored


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


def write_tensors(
    file: BinaryIO,
    tensors: Mapping[str, Tensor],
    parts: Iterable[dict[str, Tensor]] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as a file of safetensors, one after the other: no second copy of all of them is in memory.

    Args:
        tensors: by their names; where there are ``parts``, these say of what types and shapes they are, and no more.
        parts: that have the values, each of some of them; they are emptied.
    """
    import torch

    names = sorted(tensors, key=lambda name: -tensors[name].element_size())  # each begins at a multiple of its size
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, at = dict[str, int](), 0
    for name in names:
        t = tensors[name]
        begins[name], end = at, at + t.numel() * t.element_size()
        header[name] = {"dtype": name_dtype(t.dtype), "shape": list(t.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    if parts is None:
        parts = ({name: tensors[name]} for name in names)
    for part in parts:
        while part:  # whoever made it may still hold it
            name, tensor = part.popitem()
            file.seek(8 + len(text) + begins[name])
            file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor


def name_dtype(dtype: torch.dtype) -> str:
    """Return safetensors' name of a type."""
    return {own: name for name, own in list_dtypes().items()}[dtype]


def list_dtypes() -> dict[str, torch.dtype]:
    """List torch's types by safetensors' names."""
    import torch

    return {
        **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
        **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
        **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    }
