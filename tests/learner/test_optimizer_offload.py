"""What optimizers hold, away from the policy's device between updates: the same numbers, and bytes that are gone.

There is no second device here: a tensor that is away is in shared memory, which torch can tell.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.optimizer_offload import OptimizerOffload
from agentrl.learner.optimizers import make_optimizers
from agentrl.types import Sample
from tests.helpers.tiny import qwen3

ROW = Sample([5, 6, 7, 8, 9, 10, 11, 12], [0] * 4 + [1] * 4, [-3.0] * 8, [0.5] * 8)


def away(tensor: Tensor) -> Tensor:
    there: Tensor = tensor.clone().share_memory_()  # type: ignore[no-untyped-call]
    return there


def is_away(tensor: Tensor) -> bool:
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def build(optimizer: str, dtype: torch.dtype, *, offloads: bool) -> Learner:
    torch.manual_seed(0)
    model: Any = qwen3().to(dtype)
    settings = LossSettings(threads=1, packing="padded", optimizer_offload=offloads)
    learner = Learner(model, make_optimizers(model, optimizer, 1e-3), settings)
    if offloads:
        learner.train_state.offload = OptimizerOffload(model, learner.optimizers, away, Tensor.clone)
        learner.train_state.offload.offload()
    return learner


def held(learner: Learner) -> Iterator[Tensor]:
    """Yield the tensors of a learner beside its policy's weights."""
    policy = set(learner.policy.parameters())
    for optimizer in learner.optimizers:
        yield from (p for group in optimizer.param_groups for p in group["params"] if p not in policy)
        yield from (
            t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim()
        )


def bytes_here(learner: Learner) -> int:
    return sum(t.nbytes for t in held(learner) if not is_away(t))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_updates_are_the_same_bit_for_bit_and_between_them_nothing_stays(optimizer: str, dtype: torch.dtype) -> None:
    plain, offloaded = (build(optimizer, dtype, offloads=offloads) for offloads in (False, True))
    assert bytes_here(offloaded) == 0
    at_steps: list[int] = []
    offloaded.optimizers[0].register_step_post_hook(lambda *_: at_steps.append(bytes_here(offloaded)))
    for _ in range(3):
        one, other = (learner.update([ROW]) for learner in (plain, offloaded))
        assert one == other
        assert bytes_here(plain) > 0
        assert bytes_here(offloaded) == 0
    assert min(at_steps) > 0, "the optimizers step at home"
    for ours, theirs in zip(plain.policy.parameters(), offloaded.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(held(plain), held(offloaded), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_is_read_and_written_while_they_are_away() -> None:
    first = build("adamw", torch.bfloat16, offloads=True)
    first.update([ROW])
    state = copy.deepcopy(first.state())
    second = build("adamw", torch.bfloat16, offloads=True)
    second.load(state)
    assert bytes_here(second) == 0
    assert first.update([ROW]) == second.update([ROW])
    assert bytes_here(second) == 0


def test_what_is_forgotten_does_not_come_back() -> None:
    learner = build("adamw", torch.float32, offloads=True)
    learner.update([ROW])
    assert learner.train_state.offload is not None
    assert learner.train_state.offload.bytes_away == sum(t.nbytes for t in held(learner)) > 0
    learner.reset_optimizers()
    assert learner.train_state.offload.bytes_away == 0


def test_the_way_there_and_back_is_an_exact_copy_and_steps_stay_where_they_are() -> None:
    learner = build("adamw", torch.float32, offloads=False)
    learner.update([ROW])
    before = [t.clone() for t in held(learner)]
    offload = OptimizerOffload(learner.policy, learner.optimizers)
    offload.offload()
    offload.offload()  # once is enough
    assert offload.bytes_away == sum(t.nbytes for t in before)
    steps = [s["step"] for s in learner.optimizers[0].state.values()]
    offload.onload()
    assert all(torch.equal(a, b) for a, b in zip(before, held(learner), strict=True))
    assert all(s["step"] is step for s, step in zip(learner.optimizers[0].state.values(), steps, strict=True))
