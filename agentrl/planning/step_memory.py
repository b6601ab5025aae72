"""The memory of the learner's step, from the learner itself: its update runs on tensors that have no values.

The policy is on torch's device ``meta``, where operations make shapes alone. What would read a value is given one. What
is counted are the bytes that the operations of `Learner.update` would take of a GPU: activations, logits, gradients,
what the optimizer makes. Rows, masks and metrics on the host stay on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from agentrl.learner.hidden_states import PREFIX
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.memory_ledger import MemoryLedger
from agentrl.learner.optimizers import make_optimizers
from agentrl.learner.prefix_tree.attention import LAYOUTS
from agentrl.learner.prefix_tree.tree import PrefixForest
from agentrl.types import Sample


@dataclass(frozen=True)
class StepMemory:
    """Bytes of an update on one GPU.

    Args:
        kept: between updates: weights, what the optimizer holds.
        peak: of an update; ``peak_op``: the operation that made it.
        passing: of a micro-batch at most, beside weights and gradients: activations, logits.
    """

    kept: int
    peak: int
    peak_op: str
    passing: int


def measure_step(
    build_policy: Callable[[], PreTrainedModel], settings: LossSettings, optimizer: str, rows: Sequence[Sample]
) -> StepMemory:
    """Measure the second update of a new learner: the optimizer has its state by then."""
    kept, peak, op = _run(build_policy(), settings, optimizer, rows, keeps_gradients=True)
    passing = measure_passing(build_policy, settings, optimizer, rows)
    return StepMemory(kept, peak, op, passing)


def measure_passing(
    build_policy: Callable[[], PreTrainedModel], settings: LossSettings, optimizer: str, rows: Sequence[Sample]
) -> int:
    """Measure what micro-batches take beside weights and gradients."""
    kept, peak, _ = _run(build_policy(), settings, optimizer, rows, keeps_gradients=False)
    return peak - kept


def _run(
    policy: PreTrainedModel, settings: LossSettings, optimizer: str, rows: Sequence[Sample], *, keeps_gradients: bool
) -> tuple[int, int, str]:
    """Update; return the bytes kept between updates, the peak of one, and the operation that made it."""
    with _without_values():
        learner = Learner(policy, make_optimizers(policy, optimizer, 1e-6), settings)
        learner.packing.chosen = PREFIX  # a proof needs values
        for parameter in policy.parameters() if not keeps_gradients else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        with _MetaLedger([*policy.parameters(), *learner.train_state.list_masters()]) as ledger:
            if keeps_gradients:  # by the second update the optimizer has its state
                learner.update(rows)
            kept = ledger.live
            ledger.restart_peak()
            learner.update(rows)
    return kept, ledger.peak, ledger.peak_op


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def make_rows(tokens: int, context: int, sampled: int) -> list[Sample]:
    """Make rows of ``context`` tokens that fill a micro-batch of so many; ``sampled`` of each are trained."""
    sampled = min(sampled, context - 1)
    rows = []
    for number in range(max(tokens // context, 1)):
        mask = [0] * (context - sampled) + [1] * sampled
        rows.append(Sample([number + 1] * context, mask, [-1.0] * context, [0.5] * context))
    return rows


@contextmanager
def _without_values() -> Iterator[None]:
    """Let the learner run on tensors without values, with the attention of a kernel that keeps no scores."""
    LAYOUTS["meta"] = _KernelLayout
    try:
        with _GivenValues():
            yield
    finally:
        del LAYOUTS["meta"]


class _KernelLayout:
    """A forest for an attention kernel that keeps its inputs, its outputs, and one number a head and token."""

    def __init__(self, forest: PrefixForest, device: torch.device) -> None:
        self.token_ids = torch.tensor(forest.token_ids, dtype=torch.int64)[None].to(device)
        self.positions = torch.tensor(forest.positions, dtype=torch.int64)[None].to(device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
        """Make an output of attention's shape."""
        attended: Tensor = _Kernel.apply(query, key, value)  # type: ignore[no-untyped-call]
        return attended


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _GivenValues(TorchFunctionMode):
    """Gives a value to whatever asks a tensor for one that has none."""

    _ANSWERS: Mapping[Any, Any] = {
        torch.Tensor.item: 1.0,
        torch.Tensor.__float__: 1.0,
        torch.Tensor.__int__: 1,
        torch.Tensor.__bool__: True,
        torch.allclose: True,
        torch.equal: True,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if func in self._ANSWERS:
                return self._ANSWERS[func]
            if func is torch.Tensor.tolist:
                return torch.zeros(args[0].shape).tolist()
            if func is torch.Tensor.cpu or (
                func is torch.Tensor.to and "cpu" in map(str, [*args[1:], *kwargs.values()])
            ):
                return torch.zeros(args[0].shape, dtype=args[0].dtype)
        return func(*args, **kwargs)


class _MetaLedger(MemoryLedger):  # type: ignore[no-untyped-call]
    """Counts what has no values: all that would be on the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == "aten._local_scalar_dense.default" and args[0].is_meta:
            return 1.0
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _add(self, tensor: Tensor, op: str) -> None:
        if tensor.is_meta:
            super()._add(tensor, op)
