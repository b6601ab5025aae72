"""A tensor that lies in files of safetensors, whole or in pieces, and is read as far as it is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from agentrl.models.tensor_file import list_dtypes, load_header, read_header
from agentrl.settings.documents import open_regular, parse_json

_ROWS = "first_rows"  # in a file's metadata


@dataclass(frozen=True)
class StagedTensor:
    """A tensor that is about to be saved, under a name: every process has a copy of its piece."""

    name: str


@dataclass(frozen=True)
class _Piece:
    """The elements of a tensor from ``begin`` to ``end``, from a byte of a file on."""

    path: str
    position: int
    begin: int
    end: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in files. Nothing of it is in memory. Its pieces are in order, and leave no gap."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[_Piece, ...]

    def read(self) -> Tensor:
        """Read all of it. Raises OSError and ValueError: a file is gone, or is another one by now."""
        return self._read(0, self.shape.numel()).view(self.shape)

    def read_rows(self, begin: int, end: int) -> Tensor:
        """Read the entries of its first dimension from ``begin`` to ``end``, and nothing else of the files."""
        size = prod(self.shape[1:])
        return self._read(begin * size, end * size).view(end - begin, *self.shape[1:])

    def _read(self, begin: int, end: int) -> Tensor:
        found, width = torch.empty(end - begin, dtype=self.dtype), self.dtype.itemsize
        place = found.view(torch.uint8).numpy().data
        for piece in self.pieces:
            first, last = max(begin, piece.begin), min(end, piece.end)
            if first >= last:
                continue
            with open_regular(Path(piece.path)) as file:
                file.seek(piece.position + (first - piece.begin) * width)
                wanted = place[(first - begin) * width : (last - begin) * width]
                if file.readinto(wanted) != len(wanted):
                    raise ValueError(f"{Path(piece.path).name} is shorter than its header says")
        return found


def describe_pieces(first_rows: Mapping[str, int]) -> dict[str, str]:
    """Return the metadata of a file of pieces: at which row of its tensor each begins."""
    return {_ROWS: json.dumps(dict(first_rows))}


def find_saved_tensors(paths: Sequence[Path]) -> dict[str, SavedTensor]:
    """Find the tensors of files by their headers; what has one name in several is pieces of one, cut along its rows.

    Raises:
        OSError: a file cannot be read.
        ValueError: one is no file of safetensors, or pieces do not fit together.
    """
    found: dict[str, list[_Found]] = {}
    try:
        for path in paths:
            for name, piece in _find_pieces(path):
                found.setdefault(name, []).append(piece)
        return {
            name: _join(sorted(pieces, key=lambda piece: (piece.row, piece.shape))) for name, pieces in found.items()
        }
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _find_pieces(path: Path) -> Iterator[tuple[str, _Found]]:
    read_header(path)
    header, start, _ = load_header(path)
    rows = parse_json(header.pop("__metadata__", {}).get(_ROWS, "{}"))
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        piece = _Found(rows.get(name, 0), entry["shape"], list_dtypes()[entry["dtype"]], path, start + begin)
        if prod(piece.shape) * piece.dtype.itemsize != end - begin:
            raise ValueError(f"{path.name}: tensor {name:.80} has another size")
        yield name, piece


@dataclass(frozen=True)
class _Found:
    """A piece as the header of its file describes it."""

    row: int
    shape: list[int]
    dtype: torch.dtype
    path: Path
    position: int


def _join(found: Sequence[_Found]) -> SavedTensor:
    first, rows, pieces = found[0], 0, list[_Piece]()
    size = prod(first.shape[1:])
    for own in found:
        alike = own.shape[1:] == first.shape[1:] and own.dtype == first.dtype
        if own.row != rows or not alike or (pieces and not own.shape):
            raise ValueError(f"the pieces of a tensor do not fit together, one of {own.path.name}")
        begin = rows * size
        pieces.append(_Piece(str(own.path.absolute()), own.position, begin, begin + prod(own.shape)))
        rows += own.shape[0] if own.shape else 0
    return SavedTensor(torch.Size([rows, *first.shape[1:]] if first.shape else []), first.dtype, tuple(pieces))
