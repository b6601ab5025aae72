"""The state of a learner in shards: nobody holds more than a part of it, and no kill leaves half of one behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from agentrl.learner.sharded_state import StagedPieces, pair_masters
from agentrl.models.saved_tensor import SavedTensor
from agentrl.training import checkpoint

HERE = Path(__file__).parents[2]
KILLS = int(os.environ.get("AGENTRL_SAVING_KILLS", "2"))


def start(processes: int, *words: object) -> subprocess.Popen[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *launch, "-m", "tests.helpers.saving", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = subprocess.DEVNULL if "forever" in words else subprocess.PIPE
    return subprocess.Popen(
        command, cwd=HERE, env=environment, start_new_session=True, stderr=out, stdout=subprocess.DEVNULL, text=True
    )


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the most that a process had from /proc")
def test_no_process_holds_more_than_its_part_beside_its_shards(tmp_path: Path) -> None:
    process = start(2, tmp_path / "checkpoints", "weigh", tmp_path / "peaks.json")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said[-3000:]
    first, other = json.loads((tmp_path / "peaks.json").read_text())
    assert first["own"] <= 0.51 * first["whole"]
    slack = 8 << 20
    assert first["save"] <= first["own"] + slack
    assert first["load"] <= first["own"] + slack
    assert other["both"] <= other["own"] + slack
    print(f"\nof {first['whole'] >> 20} MiB: {first['save'] >> 20} to save, {first['load'] >> 20} to load")


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_checkpoint_whole(tmp_path: Path) -> None:
    """All that one holds is of one step, though the next one went on while it was written."""
    dice = random.Random(0)
    for number in range(KILLS):
        folder = tmp_path / str(number)
        process = start(2, folder, "forever")
        try:
            deadline = time.monotonic() + 120
            while checkpoint.newest_step(folder) is None and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(dice.uniform(0, 2))
            if number % 2 == 0:  # while it is being written
                while not list(folder.glob(".step-*.part/shard-*")) and time.monotonic() < deadline:
                    pass
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        kill_workers(folder)
        found = checkpoint.load(folder)
        assert found is not None
        step, state = found
        assert state["step"] == step
        (optimizer,) = state["learner"]["optimizers"]
        saved = [*state["learner"]["policy"].values(), *(t for s in optimizer["state"].values() for t in s.values())]
        assert len(saved) > 100
        assert all(isinstance(tensor, SavedTensor) and (tensor.read() == step).all() for tensor in saved)


def kill_workers(folder: Path) -> None:
    """Kill what torchrun started: each is of a session of its own."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and entry.name != str(os.getpid()):
            try:
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue


def test_what_is_staged_is_a_copy_under_a_name() -> None:
    pieces, weight = StagedPieces(rank=0), torch.ones(2)
    named = pieces.stage({"a": [weight, 3], "b": {"c": (weight, "d")}}, "learner")
    weight.zero_()
    assert [named["a"][0].name, named["b"]["c"][0].name] == ["learner/a/0", "learner/b/c/0"]
    assert named["a"][1] == 3
    assert named["b"]["c"][1] == "d"
    assert {name: tensor.tolist() for name, tensor in pieces.tensors.items()} == {
        "learner/a/0": [1.0, 1.0],
        "learner/b/c/0": [1.0, 1.0],
    }
    other = StagedPieces(rank=1)
    assert other.stage({"a": [weight, 3]}, "learner") == {"a": [named["a"][0], 3]}
    assert not other.tensors  # the first process writes what all have


def test_masters_and_shards_begin_with_each_others_values() -> None:
    half, single = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    master, whole = torch.full((2,), 1.001), torch.full((2,), 1.002)
    alone = {"policy": {"h": half, "s": single}, "masters": [master]}
    in_shards = {"policy": {"h": whole, "s": single}, "masters": [], "stepped": ["s", "h"]}
    h, s, own = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    assert pair_masters([s, h], {s: "s", h: "h"}, alone) == [(h, master)]
    assert pair_masters([s, own], {s: "s"}, in_shards) == [(own, whole)]
    assert pair_masters([s, own], {s: "s"}, alone) == [(own, master)]
    assert pair_masters([s, h], {s: "s", h: "h"}, in_shards) == []
