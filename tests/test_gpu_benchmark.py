"""``benchmarks/gpu.py`` where there is no GPU: it says so, runs what a CPU can, and a failing section ends nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"
pytestmark = pytest.mark.slow


def run(*words: str) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_without_cuda_it_says_so_and_what_to_do() -> None:
    status, said = run()
    assert status == 2
    assert said == (
        "there is no CUDA on this machine; what a CPU can: python benchmarks/gpu.py --device cpu --model nano\n"
    )


def test_sections_of_a_cpu_run_and_agree() -> None:
    status, said = run("--device", "cpu", "--model", "nano", "--only", "flex", "sleep", "weights")
    assert status == 0, said
    assert said.rstrip().endswith("nothing failed")
    assert "left out: needs CUDA and vLLM" in said
    assert said.count(" ok ") == 2, "flex attention's values; greedy tokens of the new weights"


@pytest.mark.long
def test_a_section_that_fails_ends_no_other() -> None:
    status, said = run("--device", "cpu", "--model", "no-such-model", "--only", "engine", "flex")
    assert status == 1
    assert "1 failed" in said
    assert "no-such-model" in said
    assert said.count(" ok ") == 1
