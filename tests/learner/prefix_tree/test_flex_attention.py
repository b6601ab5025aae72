"""Attention over a forest by flex attention: the numbers of the plain layout, values and gradients. Not compiled here:
the kernel for GPUs is made of the same mask.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.learner.prefix_tree.attention import RAGGED, SdpaLayout
from agentrl.learner.prefix_tree.flex_attention import FlexLayout
from agentrl.learner.prefix_tree.tree import PrefixForest, build_forest

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 4, 2, 8


@st.composite
def forests(draw: st.DrawFn) -> PrefixForest:
    """Of rows that branch anywhere; some are long and uneven."""
    lengths = st.sampled_from([1, 5, 40, 150, 400])
    rows = [[0] * draw(lengths)]
    for number in range(1, draw(st.integers(1, 6))):
        trunk = draw(st.sampled_from(rows))
        rows.append([*trunk[: draw(st.integers(0, len(trunk)))], *[number] * draw(lengths)])
    return build_forest(sorted(rows))


def given_to(tokens: int, **more: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return [torch.randn(*shape, generator=generator, **more) for shape in shapes]


def outcome(layout: Any, given: list[torch.Tensor], window: int | None) -> list[torch.Tensor]:
    """What comes of attention, and the gradients of queries, keys and values."""
    out = layout.attend(*given, DIM**-0.5, window)
    torch.autograd.backward(out.sin().sum())
    return [out.detach(), *(t.grad for t in given if t.grad is not None)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 7])
@settings(max_examples=5, deadline=None)
@given(forest=forests())
def test_both_layouts_see_the_same(forest: PrefixForest, window: int | None) -> None:
    """Values alone: torch has no backward pass of flex attention on the CPU."""
    q, k, v = given_to(len(forest.token_ids))
    plain, flex = (kind(forest, CPU).attend(q, k, v, DIM**-0.5, window) for kind in (SdpaLayout, FlexLayout))
    torch.testing.assert_close(plain, flex, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("window", [None, 7])
def test_on_a_gpu_the_kernel_has_the_gradients_too(window: int | None) -> None:
    forest, cuda = build_forest(sorted([0] * 300 + [n] * (50 * n) for n in range(1, 6))), torch.device("cuda")
    sides = []
    for kind in (SdpaLayout, FlexLayout):
        given = [t.cuda().requires_grad_() for t in given_to(len(forest.token_ids))]
        sides.append(outcome(kind(forest, cuda), given, window))
    for one, other in zip(*sides, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-2)


@pytest.mark.parametrize("window", [None, 7])
def test_long_uneven_nodes_go_one_by_one_with_the_numbers_of_padded_ones(window: int | None) -> None:
    trunk = [0] * 90
    forest = build_forest(sorted([*trunk, *[number] * (30 * number)] for number in range(1, 9)))
    alone, padded = SdpaLayout(forest, CPU), SdpaLayout(forest, CPU)
    assert [f.ragged for f in alone.siblings] == [False, True]
    assert sum(range(1, 9)) * 30 >= RAGGED * 8
    padded.siblings[1].ragged = False
    given = {"dtype": torch.float64, "requires_grad": True}
    sides = [outcome(layout, given_to(len(forest.token_ids), **given), window) for layout in (alone, padded)]
    for one, other in zip(*sides, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
