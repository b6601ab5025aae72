"""A policy in shards: the gradients of one process, in a part of its memory.

The whole matrix of cases runs where AGENTRL_EVERY_CASE is set (make long ARGS=sharding).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agentrl import UserError
from agentrl.learner.sharding import choose_shape, find_layers
from agentrl.models.saved_tensor import find_saved_tensors
from tests.helpers.sharded import BESIDE, EVERY, PAIRWISE
from tests.helpers.tiny import qwen3

HERE = Path(__file__).parents[2]
EVERY_CASE = bool(os.environ.get("AGENTRL_EVERY_CASE"))
CASES = EVERY if EVERY_CASE else PAIRWISE


def run(processes: int, folder: Path, dtype: str, cases: list[str]) -> dict[str, Any]:
    """Learn the cases in so many processes, and load what they came to."""
    out = folder / f"{dtype}-{processes}.pt"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] * (processes > 1)
    words = [sys.executable, *launch, "-m", "tests.helpers.sharded", str(out), dtype, *cases]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800, check=False, cwd=HERE)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: dict[str, Any] = torch.load(out, weights_only=False)
    return loaded


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Compute the relative L2 norm of a difference, over all parameters."""
    off = sum(float((one[n].double() - other[n].double()).square().sum()) for n in one)
    length = sum(float(one[n].double().square().sum()) for n in one)
    return float((off / length) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "dtype", "bound"),
    [
        *((2, "float64", 1e-9), (4, "float32", 1e-5)),
        *(pytest.param(count, "float32", 1e-5, marks=pytest.mark.long) for count in (2, 3)),
        *([(3, "float64", 1e-9), (4, "float64", 1e-9)] if EVERY_CASE else []),
    ],
)
def test_the_gradients_of_one_process(
    processes: int, dtype: str, bound: float, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cases = CASES if CASES is EVERY or processes == 2 else CASES[processes::4]
    alone, many = run(1, tmp_path, dtype, cases), run(processes, tmp_path, dtype, cases)
    worst = {}
    for case in cases:
        one, other = alone["found"][case], many["found"][case]
        worst[case] = distance(one["changed"], other["changed"])
        assert worst[case] < bound, case
        assert other["metrics"] == pytest.approx(one["metrics"], rel=1e-4, abs=1e-5)
        for mine, whole in zip(one["old"], other["old"], strict=True):
            torch.testing.assert_close(mine, whole, atol=1e-4, rtol=1e-4)
        shares = [of[case] for of in many["shares"]]
        assert sum(shares) == pytest.approx(1.0, abs=0.05)
        assert max(shares) <= 1 / processes + 0.05
    print(f"\n{dtype}, {processes} processes, {len(cases)} cases: at most {max(worst.values()):.1e} apart")


@pytest.mark.long
def test_experts_checkpointed_layers_and_bfloat16_are_as_in_one_process(tmp_path: Path) -> None:
    alone, many = run(1, tmp_path, "float32", BESIDE), run(3, tmp_path, "float32", BESIDE)
    for case in BESIDE:
        one, other = alone["found"][case], many["found"][case]
        assert distance(one["changed"], other["changed"]) < (1e-2 if "bf16" in case else 1e-5), case
        assert other["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["full", pytest.param("none", marks=pytest.mark.long)])
def test_replayed_experts_teach_as_in_one_process(
    sharding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [case for case in BESIDE if case.endswith("-replay")]
    alone = run(1, tmp_path, "float32", cases)
    monkeypatch.setenv("SHARDING", sharding)
    many = run(2, tmp_path, "float32", cases)
    for case in cases:
        one, other = alone["found"][case], many["found"][case]
        assert one["metrics"]["router/replay_disagreement"] > 0.5
        assert distance(one["changed"], other["changed"]) < 1e-5
        assert other["metrics"] == pytest.approx(one["metrics"], rel=1e-4, abs=1e-5)


@pytest.mark.long
def test_shards_of_a_machine_and_the_same_ones_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ["full-prefix-tied-beta", "lora-padded-untied-iterations"]
    alone = run(1, tmp_path, "float32", cases)
    monkeypatch.setenv("SHARDING", "hybrid")
    many = run(4, tmp_path, "float32", cases)
    for case in cases:
        assert distance(alone["found"][case]["changed"], many["found"][case]["changed"]) < 1e-5
        assert max(of[case] for of in many["shares"]) <= 1 / 2 + 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "saved_by", "others", "bound"),
    [
        ("full-muon-float32", 2, [3], 1e-6),
        pytest.param("full-muon-float32", 2, [1, 4], 1e-6, marks=pytest.mark.long),
        pytest.param("lora-adamw-float32", 1, [2], 1e-6, marks=pytest.mark.long),
        pytest.param("qlora-adamw-bfloat16", 2, [2], 0.0, marks=pytest.mark.long),
        pytest.param("full-adamw-bfloat16", 2, [2], 0.0, marks=pytest.mark.long),
        *([("full-adamw-bfloat16", 1, [2], 1e-3)] if EVERY_CASE else []),  # one has masters: half precision rounds
        pytest.param("full-adamw-bfloat16", 3, [1], 1e-3, marks=pytest.mark.long),
    ],
)
def test_what_some_processes_saved_any_number_goes_on_with(
    case: str, saved_by: int, others: list[int], bound: float, tmp_path: Path
) -> None:
    words = [str(tmp_path / "checkpoints"), case]
    whole = run(saved_by, tmp_path, "go-on", words)
    for processes in others:
        assert distance(whole, run(processes, tmp_path, "go-on", words)) <= bound


@pytest.mark.long
def test_machines_that_have_the_same_shards_save_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [str(tmp_path / "checkpoints"), "full-adamw-float32"]
    monkeypatch.setenv("SHARDING", "hybrid")
    whole = run(4, tmp_path, "go-on", words)
    parts = [p.stat().st_size for p in (tmp_path / "checkpoints" / "step-000002").glob("shard-*")]
    saved = find_saved_tensors(list((tmp_path / "checkpoints" / "step-000002").glob("shard-*")))
    tensors = sum(t.shape.numel() * t.dtype.itemsize for t in saved.values())
    assert len(parts) == 4
    assert tensors < sum(parts) < 1.3 * tensors  # headers; those of a tiny model are long beside it
    assert distance(whole, run(1, tmp_path, "go-on", words)) < 1e-6


def test_the_processes_have_a_shape() -> None:
    assert choose_shape("full", 1, 1) is None
    assert choose_shape("none", 8, 8) is None
    assert choose_shape("full", 16, 8) == (16,)
    assert choose_shape("hybrid", 16, 8) == (2, 8)
    assert choose_shape("hybrid", 8, 8) == (8,)  # one machine
    with pytest.raises(UserError, match=r"learner\.sharding hybrid: 12 processes are no multiple of the 8"):
        choose_shape("hybrid", 12, 8)


def test_what_is_gathered_at_once_is_a_layer() -> None:
    assert len(find_layers(qwen3())) == 3
    bare: Any = nn.Module()
    bare.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    bare.heads = nn.ModuleList([nn.Linear(2, 2)])
    assert find_layers(bare) == list(bare.blocks)
