"""The learner in two processes: the numbers of one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.learner.ranks import Ranks

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

UPDATES = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
from test_states import alike
from tiny import qwen3
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.optimizers import make_optimizers
from agentrl.learner.ranks import joined

ranks = joined()
torch.manual_seed(ranks.rank)  # they begin apart
policy = qwen3().eval()
with torch.no_grad():
    policy.model.norm.weight.add_(float(ranks.rank))
settings = LossSettings(threads=1, token_budget=300, updates=2, beta=0.1, entropy_coef=0.01, loss=sys.argv[3])
learner = Learner(policy, make_optimizers(policy, "adamw", 1e-3), settings, ranks)
if ranks.follows:
    learner.follow()
else:
    told, old = [], []
    for rows in (alike(0), alike(1), alike(2)[:1]):  # at last fewer micro-batches than processes
        told.append(learner.update(rows))
        old += learner.old
        learner.set_lr(1.0 if len(told) < 2 else 0.5)
    ranks.tell(None)
said = {} if ranks.follows else {"told": told, "old": old}
torch.save({"policy": policy.state_dict(), **said}, f"{sys.argv[1]}/{ranks.rank}.pt")
ranks.leave()
"""


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_two_processes_learn_what_one_learns(loss: str, tmp_path: Path) -> None:
    script, here = tmp_path / "updates.py", str(Path(__file__).parent)
    script.write_text(UPDATES)
    for folder in ("two", "one"):
        (tmp_path / folder).mkdir()
    run(*TORCHRUN, str(script), str(tmp_path / "two"), here, loss)
    run(sys.executable, str(script), str(tmp_path / "one"), here, loss)
    first, second = (torch.load(tmp_path / "two" / f"{rank}.pt") for rank in (0, 1))
    alone = torch.load(tmp_path / "one" / "0.pt")
    for name, weight in alone["policy"].items():
        assert torch.equal(first["policy"][name], second["policy"][name])
        torch.testing.assert_close(first["policy"][name], weight, atol=1e-5, rtol=1e-4)
    for one, other in zip(first["told"], alone["told"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert len(first["old"]) == len(alone["old"]) > 10  # of all rows, whoever learned from them
    for mine, whole in zip(first["old"], alone["old"], strict=True):
        torch.testing.assert_close(mine, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_by_the_command_line(tmp_path: Path) -> None:
    words = ["-m", "agentrl", "train", "--env", "math-tools", "--steps", "2", "--eval.final_tasks", "8"]
    words += ["--rollout.tasks", "4", "--rollout.group_size", "4", "--eval.every", "0", "--learner.token_budget", "512"]
    run(*TORCHRUN, *words, "--run.dir", str(tmp_path / "two"))
    run(sys.executable, *words, "--run.dir", str(tmp_path / "one"))
    two, one = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("two", "one"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=2e-3, rtol=1e-2)
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "grad_norm" in line] == [1, 2]


@pytest.mark.slow
def test_several_processes_go_on_together(tmp_path: Path) -> None:
    """The optimizer's memory is everybody's: copies that step apart would not stay the same."""
    words = ["-m", "agentrl", "train", "--env", "math-tools", "--steps", "3", "--eval.final_tasks", "2"]
    words += ["--rollout.tasks", "4", "--rollout.group_size", "4", "--eval.every", "0"]
    words += ["--deterministic", "true", "--run.save_every", "1"]
    run(*TORCHRUN, *words, "--run.dir", str(tmp_path / "whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-000003")
    run(*TORCHRUN, "-m", "agentrl", "train", "--resume", str(tmp_path / "parts"))
    whole, parts = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_alone_there_is_nothing_to_do() -> None:
    ranks = Ranks()
    assert not ranks.follows
    assert ranks.own([1, 2, 3]) == [1, 2, 3]
    assert ranks.gathered("mine") == ["mine"]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 5, 6])
def test_what_was_shared_out_is_put_together_again(world: int, count: int) -> None:
    ranks = [Ranks(rank, world) for rank in range(world)]
    whole = list(range(count))
    assert ranks[0].put_together([r.own(whole) for r in ranks]) == whole


def test_alone_nobody_is_told() -> None:
    ranks = Ranks()
    ranks.tell(None)
    ranks.leave()
