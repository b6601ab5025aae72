"""Tensors in pieces: whatever number of files they are in, the rows that are asked for come, and nothing is made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.models.saved_tensor import describe_pieces, find_saved_tensors
from agentrl.models.tensor_file import write_tensors


def write(path: Path, tensors: dict[str, torch.Tensor], first_rows: dict[str, int] | None = None) -> Path:
    with path.open("wb") as file:
        write_tensors(file, tensors, metadata=None if first_rows is None else describe_pieces(first_rows))
    return path


@pytest.mark.parametrize("cuts", [(7,), (2, 5), (1, 1, 1, 4), (4, 0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_rows_come_from_whatever_files_they_are_in(cuts: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.randint(0, 2 if dtype == torch.bool else 100, (7, 3, 2)).to(dtype)
    paths, row = [], 0
    for number, piece in enumerate(torch.split(whole, list(cuts))):
        others = {"a": torch.ones(5, dtype=torch.uint8), f"scalar {number}": torch.tensor(number)}
        paths.append(
            write(tmp_path / f"{number}.safetensors", {"w": piece.clone(), **others}, {"w": row, "a": number * 5})
        )
        row += len(piece)
        assert load_file(paths[-1])["w"].equal(piece)  # anybody else reads it too
    saved = find_saved_tensors(paths[::-1])
    assert saved["w"].shape == whole.shape
    assert saved["w"].read().equal(whole)
    for begin in range(8):
        for end in range(begin, 8):
            assert saved["w"].read_rows(begin, end).equal(whole[begin:end])
    assert saved["scalar 0"].read().equal(torch.tensor(0))
    assert saved["scalar 0"].shape == ()


def test_pieces_that_leave_a_gap_or_are_of_other_tensors_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "first.safetensors", {"w": torch.ones(2, 3)}, {"w": 0})
    for other, row in (
        (torch.ones(2, 3), 3),
        (torch.ones(2, 3), 1),
        (torch.ones(2, 3), 0),
        (torch.ones(2, 4), 2),
        (torch.ones(2), 2),
        (torch.tensor(1.0), 2),
        (torch.ones(2, 3, dtype=torch.float64), 2),
    ):
        second = write(tmp_path / "second.safetensors", {"w": other}, {"w": row})
        with pytest.raises(ValueError, match=r"the pieces of a tensor do not fit together, one of second"):
            find_saved_tensors([first, second])
    with pytest.raises(ValueError, match="do not fit together"):  # the first is missing
        find_saved_tensors([write(tmp_path / "second.safetensors", {"w": torch.ones(2, 3)}, {"w": 2})])


@pytest.mark.parametrize(
    "header",
    [
        {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}},
        {"w": {"dtype": "X32", "shape": [2], "data_offsets": [0, 8]}},
        {"w": {"shape": [2], "data_offsets": [0, 8]}},
        {"__metadata__": {"first_rows": "[1"}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"__metadata__": {"first_rows": "[1]"}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"__metadata__": {"first_rows": '{"w": "0"}'}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"__metadata__": {"first_rows": '{"w": -1}'}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"__metadata__": 3, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
    ],
)
def test_headers_that_lie_are_refused(header: object, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    path = tmp_path / "t.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match=r".+"):
        find_saved_tensors([path])


def test_a_file_that_became_shorter_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "t.safetensors", {"w": torch.ones(4)})
    saved = find_saved_tensors([path])["w"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"t\.safetensors is shorter than its header says"):
        saved.read()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        saved.read()
