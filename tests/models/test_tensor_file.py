"""A file of safetensors is what its header says, or it is refused before anything of it is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentrl.models.tensor_file import check_room, read_header

GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def write(path: Path, header: Any, data: bytes = bytes(8)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_what_a_file_holds(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16), "none": torch.zeros(0)}
    save_file(tensors, tmp_path / "t.safetensors", {"format": "pt"})
    assert sorted(read_header(tmp_path / "t.safetensors")) == [("a", "F32", 6), ("b", "BF16", 5), ("none", "F32", 0)]


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"", "is no file of safetensors"),
        (b"[1]", "is no file of safetensors"),
        (b"{" * 500, "Expecting property name|nested more than"),
        (b"[" * 100_000, "nested more than 100 deep"),
        ({"a": 7}, "is no file of safetensors"),
        ({"a": {"shape": [2]}}, "is no file of safetensors"),
        ({"a": GOOD["a"] | {"shape": 2}}, "is no file of safetensors"),
        ({"a": GOOD["a"] | {"shape": ["2"]}}, "is no file of safetensors"),
        ({"a": GOOD["a"] | {"shape": [10**4000] * 1000}}, "is no file of safetensors"),
        ({"a": GOOD["a"] | {"shape": [1] * 65}}, "is no file of safetensors"),
        ({"a": GOOD["a"] | {"shape": [1 << 40]}}, "tensor a is not in the file"),
        ({"a": GOOD["a"] | {"data_offsets": [0, 1 << 40]}}, "tensor a is not in the file"),
        ({"a": GOOD["a"] | {"data_offsets": [8, 0]}}, "tensor a is not in the file"),
        ({"a": GOOD["a"] | {"data_offsets": [0, 4]}}, "its tensors take 4 bytes, and it holds 8"),
        (GOOD | {"b": GOOD["a"]}, "its tensors take 16 bytes, and it holds 8"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_header_that_is_not_true_is_refused(header: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        read_header(write(tmp_path / "t.safetensors", header))


def test_a_header_without_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with path.open("wb") as file:
        file.write((1 << 34).to_bytes(8, "little"))
        file.truncate(1 << 35)
    with pytest.raises(ValueError, match="is no file of safetensors"):
        read_header(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.safetensors")
    with pytest.raises(ValueError, match="it is no regular file"):
        read_header(tmp_path / "t.safetensors")


def test_a_file_of_holes_or_larger_than_there_is_room_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.safetensors", GOOD)
    check_room(path)
    with pytest.raises(ValueError, match=r"has \d+ bytes, and this machine's memory 9"):
        check_room(path, 9)
    os.truncate(path, 40 << 30)
    if path.stat().st_blocks:
        with pytest.raises(ValueError, match=r"says that it has 42,949,672,960 bytes, and [\d,]+ are on the disk"):
            check_room(path)
