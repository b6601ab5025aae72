"""A learner in shards that saves again and again, or once and looks at its memory: run by torchrun.

python -m tests.helpers.saving FOLDER forever       every tensor of a step's checkpoint is full of the step's number
python -m tests.helpers.saving FOLDER weigh OUT     what each process takes beside its shards, to save and to load
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from agentrl.learner.distributed import ProcessGroup, init_process_group
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.optimizers import make_optimizers
from agentrl.learner.sharding import read_local
from agentrl.training import checkpoint
from tests.helpers.tiny import qwen3

ROWS = 20_000  # of the embeddings: 4.9 MiB, and moments twice that


class FillingLearner(Learner):
    """One whose step fills all that a checkpoint holds with its number."""

    @torch.no_grad()
    def fill(self, number: float) -> None:
        for parameter in self.train_state.parameters.values():
            parameter.fill_(number)
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for tensor in state.values():
                    tensor.fill_(number)

    def begin(self) -> None:
        """Let the optimizers make what they keep."""
        for parameter in self.train_state.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in self.optimizers:
            optimizer.step()

    def follow(self) -> None:
        """Take part in what the first process saves, once."""
        assert self.process_group.receive() == "state"
        assert self.part_writer is not None
        self.part_writer.stage(self._collect_state())


def build(group: ProcessGroup, rows: int) -> FillingLearner:
    settings = LossSettings(threads=1, beta=0.0)
    policy = qwen3(vocab_size=rows)
    learner = FillingLearner(policy, lambda p: make_optimizers(p, "adamw", 1e-3), settings, group, "full", False)
    learner.begin()
    return learner


def save_forever(folder: Path, group: ProcessGroup) -> None:
    """Save; the next step goes on while it is written."""
    learner, step = build(group, ROWS), 0
    while True:
        step += 1
        learner.fill(step)
        if group.is_worker:
            learner.follow()
        else:
            state = checkpoint.encode_state({"learner": learner.state(), "step": step})
            write = partial(checkpoint.save, folder, step, state, parts=learner.part_writer)
            thread = threading.Thread(target=write)
            thread.start()
        learner.fill(-step)
        if not group.is_worker:
            thread.join()


def measure(what: Callable[[], object]) -> int:
    """Return the bytes by which the most that this process ever had grew meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")
    before = read_peak()
    what()
    return read_peak() - before


def read_peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def weigh(folder: Path, group: ProcessGroup, out: Path) -> None:
    """Save and load a learner of some size; write what that took in each process, and what it has."""
    learner, steps = build(group, 10 * ROWS), dict[str, int]()
    tensors = [t for o in learner.optimizers for s in o.state.values() for t in s.values()]
    tensors += list(learner.train_state.policy.parameters())
    steps["own"], steps["whole"] = sum(read_local(t).nbytes for t in tensors), sum(t.nbytes for t in tensors)
    if group.is_worker:
        steps["both"] = measure(learner.run_worker)
    else:
        steps["save"] = measure(partial(save_once, learner, folder))
        found = checkpoint.load(folder)
        assert found is not None
        steps["load"] = measure(partial(learner.load, found[1]["learner"]))
        group.broadcast(None)
    every = group.all_gather(steps)
    if not group.is_worker:
        out.write_text(json.dumps(every))


def save_once(learner: Learner, folder: Path) -> None:
    state = checkpoint.encode_state({"learner": learner.state()})
    checkpoint.save(folder, 1, state, parts=learner.part_writer)
    assert learner.part_writer is not None
    learner.part_writer.release()


def main() -> None:
    folder, mode, *out = sys.argv[1:]
    group = init_process_group()
    if mode == "forever":
        save_forever(Path(folder), group)
    weigh(Path(folder), group, Path(*out))
    group.destroy()


if __name__ == "__main__":
    main()
