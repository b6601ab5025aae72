"""A step of the learner lets a GPU run ahead: what it waits for is on these lists, a step or a micro-batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from agentrl.learner import hidden_states
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.optimizers import make_optimizers
from agentrl.learner.prefix_tree.attention import SdpaLayout
from agentrl.learner.prefix_tree.flex_attention import FlexLayout, pad_to_blocks
from agentrl.learner.prefix_tree.tree import PrefixForest
from agentrl.types import Sample
from tests.helpers.cuda_lint import CudaLint
from tests.helpers.tiny import qwen3

A_STEP = {
    "learner/learner.py _run_steps: _local_scalar_dense": "the loss, once all micro-batches are queued",
    "learner/train_state.py step: _local_scalar_dense": "the norm of the gradients: not finite, no step",
    "learner/losses/objective.py totals: Tensor.tolist": "the metrics, all in one read",
}
A_MICRO_BATCH = {  # behind the last one, so that there is nothing left to run ahead to
    "learner/updates.py learned: Tensor.cpu": "what each token learned, for the run's folder",
}
OF_THE_HOST = (  # of tensors that never leave the host's memory
    "learner/packing.py has_demonstrated",
    "learner/learner.py _compute_loss: nonzero",
    "learner/forward_passes.py _find_threshold",
    "learner/prefix_tree/block_map.py",
    "learner/prefix_tree/flex_attention.py <genexpr>: repeat_interleave",
    "learner/prefix_tree/attention.py __init__",  # the layout of a CPU, which stands in for the kernel here
)
QUANTILE = {
    "learner/forward_passes.py <listcomp>: Tensor.cpu": "entropies, behind a forward pass of their own",
    "learner/forward_passes.py mark_high_entropy: _local_scalar_dense": "the count of the tokens that are trained",
}
PADDED = {
    "learner/hidden_states.py _compute_padded_states: _local_scalar_dense": "transformers looks for packed sequences",
}
SFT = {"learner/losses/losses.py sft: index by a mask": "the tokens that are imitated"}


class _FlexLayout(FlexLayout):
    """What a GPU has, with the attention of the CPU: flex attention has no gradient there."""

    def __init__(self, forest: PrefixForest, device: torch.device) -> None:
        super().__init__(forest, device)
        self._plain = SdpaLayout(pad_to_blocks(forest), device)

    def attend(self, query: Any, key: Any, value: Any, scale: float | None, window: int | None) -> Any:
        self.mask(window)
        return self._plain.attend(query, key, value, scale, window)


def make_rows(*, demonstrated: bool = False) -> Iterator[Sample]:
    rng = random.Random(0)
    prompt = [rng.randrange(60) for _ in range(40)]
    for number in range(8):
        own = [rng.randrange(60) for _ in range(20)]
        logprob = float("nan") if demonstrated and number % 2 else -4.0
        yield Sample([*prompt, *own], [0] * 40 + [1] * 20, [0.0] * 40 + [logprob] * 20, [rng.uniform(-1, 1)] * 60)


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, {}),
        ({"beta": 0.1, "entropy_coef": 0.01}, {}),
        ({"num_iterations": 2, "importance_level": "sequence"}, {}),
        ({"repetition_penalty": 1.1}, {}),
        ({"top_entropy_quantile": 0.5}, QUANTILE),
        ({"packing": "padded"}, PADDED),
        ({"demonstrated": True}, {}),
        ({"demonstrated": True, "loss": "sft"}, SFT),
    ],
)
def test_nothing_else_is_waited_for(
    settings: dict[str, Any], more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "build_layout", _FlexLayout)
    rows = list(make_rows(demonstrated=settings.pop("demonstrated", False)))
    model = qwen3()
    learner = Learner(model, make_optimizers(model, "adamw", 1e-3), LossSettings(**settings, threads=1))
    learner.settings = LossSettings(**settings, threads=1, max_tokens_per_microbatch=140)
    learner.update(rows)  # the first one proves and chooses
    passes: list[object] = []
    compute = learner._compute_loss

    def count(*given: Any) -> Any:
        passes.append(given)
        return compute(*given)

    monkeypatch.setattr(learner, "_compute_loss", count)
    with CudaLint() as lint:
        learner.update(rows)
    steps = learner.settings.num_iterations
    found = {what: count for what, count in lint.found.items() if not what.startswith(OF_THE_HOST)}
    allowed = {**dict.fromkeys(A_STEP, steps), **dict.fromkeys([*A_MICRO_BATCH, *more], len(passes))}
    assert len(passes) > 1
    assert not {what: count for what, count in found.items() if count > allowed.get(what, 0)}
    assert found.keys() >= A_STEP.keys()


def test_the_lint_sees_what_makes_a_gpu_wait() -> None:
    values = torch.randn(4)
    with CudaLint() as lint:
        float(values.sum())
        values[values > 0]
        if values.isnan().any():
            values.zero_()
        torch.nonzero(values)
        values.exp().mul_(2)[torch.tensor([1, 2])]
    reads, masks, shapes = "elsewhere: _local_scalar_dense", "elsewhere: index by a mask", "elsewhere: nonzero"
    assert dict(lint.found) == {reads: 2, masks: 1, shapes: 1}
