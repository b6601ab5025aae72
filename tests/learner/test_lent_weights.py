"""The weights of a policy that no process has whole: the bits of one process, in the room of a layer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parents[2]
CASES = ["full-tied-float32", "full-untied-bfloat16", "moe-untied-float32", "lora-tied-float32"]


def run(processes: int, folder: Path, *cases: str) -> dict[str, Any]:
    """Learn, lend and write in so many processes; load what they found."""
    out = folder / f"{processes}.pt"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] * (processes > 1)
    words = [sys.executable, *launch, "-m", "tests.helpers.lent", str(out), str(folder / str(processes)), *cases]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False, cwd=HERE)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: dict[str, Any] = torch.load(out, weights_only=False)
    return loaded


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        a.dtype == other[n].dtype and torch.equal(a, other[n]) for n, a in one.items()
    )


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 3])
def test_engines_and_folders_have_the_weights_of_one_process(processes: int, tmp_path: Path) -> None:
    alone, many = run(1, tmp_path, *CASES), run(processes, tmp_path, *CASES)
    for case in CASES:
        one, other = alone[case], many[case]
        assert other["tokens"] is not None, case
        holders = {path.split("/")[2] for path in other["files"]}
        assert len(holders) == (1 if case.startswith("lora") else processes), "each has its share"
        for name, tensor in one["sent"].items():
            torch.testing.assert_close(other["sent"][name], tensor, atol=1e-4, rtol=1e-2)
        assert same(other["streamed"], other["sent"])
        assert not any(t.any() for n, t in other["zeroed"].items()), case
        assert same(other["again"], other["sent"]), case
        assert same(other["restored"], other["kept"])
        written = tmp_path / str(processes) / case
        assert same(read(written), other["sent"]), case
        expected = {p.name for p in (tmp_path / "1" / case).iterdir()} - {"README.md"}
        assert {p.name for p in written.iterdir()} >= expected
        if not case.startswith("lora"):
            loaded = AutoModelForCausalLM.from_pretrained(written)
            twin = AutoModelForCausalLM.from_pretrained(tmp_path / "1" / case)
            for (name, mine), (_, theirs) in zip(loaded.named_parameters(), twin.named_parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-2, msg=name)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_no_process_needs_more_room_than_for_a_layer(tmp_path: Path) -> None:
    found = run(2, tmp_path, "large")
    assert found["files"] >= 4
    print(f"\n{found}")
    assert max(found["grown"]) <= found["layer"] + (64 << 20)
    assert found["all"] > 4 * max(found["grown"])
