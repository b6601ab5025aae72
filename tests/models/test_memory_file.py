"""Tensors in files that have no name: read by a path, and gone with the process."""

import subprocess
import sys
from itertools import cycle, repeat
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file
from torch import Tensor

from agentrl.models import memory_file
from agentrl.models.checkpoint_layers import group_by_size, measure_layer
from agentrl.models.memory_file import MemoryFile, write_layers


def test_a_file_has_the_bits_of_every_type() -> None:
    types = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn)
    tensors = {str(t): torch.arange(6).reshape(2, 3).to(t) for t in types} | {"empty": torch.empty(0, 3)}
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).T
    file = MemoryFile.write(tensors)
    for found in (load_file(file.path or ""), load(file.read())):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8))
    file.close()
    assert not Path(file.path or "").exists()
    file.close()


@given(st.lists(st.integers(0, 50)), st.integers(1, 100))
def test_layers_go_together_until_they_are_large_enough(sizes: list[int], least: int) -> None:
    layers = [{str(n): torch.empty(size, dtype=torch.int8, device="meta")} for n, size in enumerate(sizes)]
    groups = list(group_by_size(layers, least))
    assert [layer for group in groups for layer in group] == layers
    taken = [[measure_layer(layer) for layer in group] for group in groups]
    assert all(sum(group) >= least for group in taken[:-1])
    assert all(sum(group[:-1]) < least for group in taken)


def test_who_has_no_turn_lets_the_layers_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_file, "PART_BYTES", 8)
    layers = [{str(n): torch.full((2,), float(n))} for n in range(5)]
    every = list(write_layers((dict(layer) for layer in layers), layers, repeat(True)))  # what is written is emptied
    mine = list(write_layers((dict(layer) for layer in layers), layers, cycle([True, False])))
    assert [list(load(file.read())) for file in every] == [["0"], ["1"], ["2"], ["3"], ["4"]]
    assert [list(load(file.read())) for file in mine] == [["0"], ["2"], ["4"]]
    for file in (*every, *mine):
        file.close()


def test_where_there_are_no_files_in_memory_the_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_file, "open_memory_file", lambda: None)
    tensor: Tensor = torch.arange(5.0)
    file = MemoryFile.write({"a": tensor})
    tensor.zero_()
    assert file.path is None
    assert load(file.read())["a"].tolist() == [0, 1, 2, 3, 4]


def test_a_killed_process_leaves_no_file() -> None:
    code = (
        "import torch, time; from agentrl.models.memory_file import MemoryFile; "
        "file = MemoryFile.write({'a': torch.ones(3)}); print(file.path, flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder.stdout as said:
        path = said.readline().strip()
    assert Path(path).exists()
    holder.kill()
    holder.wait()
    assert not Path(path).exists()
