"""Attention over a forest by flex attention: the numbers of the plain layout, values and gradients. Not compiled here:
the kernel for GPUs is made of the same mask.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from agentrl.errors import UserError
from agentrl.learner.memory_ledger import MemoryLedger
from agentrl.learner.prefix_tree import flex_attention as module
from agentrl.learner.prefix_tree.attention import RAGGED, SdpaLayout
from agentrl.learner.prefix_tree.block_map import BLOCK
from agentrl.learner.prefix_tree.flex_attention import FlexLayout, pad_to_blocks, run_compiled
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
    layout, count = FlexLayout(forest, CPU), len(forest.token_ids)
    padded = given_to(layout.token_ids.shape[1])
    q, k, v = padded
    flex = layout.attend(q, k, v, DIM**-0.5, window)[:count]
    q, k, v = (t[:count] for t in padded)
    plain = SdpaLayout(forest, CPU).attend(q, k, v, DIM**-0.5, window)
    torch.testing.assert_close(plain, flex, atol=1e-5, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(forest=forests(), window=st.sampled_from([None, 1, 7, 128, 300]))
def test_the_blocks_from_ranges_are_those_of_the_whole_mask(forest: PrefixForest, window: int | None) -> None:
    layout = FlexLayout(forest, CPU)
    count = layout.token_ids.shape[1]
    assert count % BLOCK == 0
    assert 0 <= count - len(forest.token_ids) < BLOCK
    own = layout.mask(window)
    whole = create_block_mask(own.mask_mod, None, None, count, count, "cpu", BLOCK)
    for name in ("kv", "full_kv", "q", "full_q"):
        for of in ("num_blocks", "indices"):
            assert torch.equal(getattr(own, f"{name}_{of}"), getattr(whole, f"{name}_{of}")), (name, of)
    assert own.seq_lengths == whole.seq_lengths == (count, count)


def test_nobody_sees_the_padding_and_it_sees_nobody() -> None:
    forest = build_forest(sorted([0] * 100 + [n] * 50 for n in range(3)))
    layout = FlexLayout(forest, CPU)
    real, mask = len(forest.token_ids), layout.mask(None)
    index = torch.arange(layout.token_ids.shape[1])
    nothing = torch.tensor(0)
    seen = mask.mask_mod(nothing, nothing, index[:, None], index[None])
    assert not seen[:real, real:].any()
    assert not seen[real:, :real].any()
    assert seen.diagonal().all()


def test_the_mask_of_32k_tokens_takes_64_mib_at_most() -> None:
    """It took 10 bytes times the square of the tokens: 10 GiB."""
    rows = sorted([n % 4] * 1024 + [n] * 480 for n in range(60))
    forest = build_forest(rows)
    assert 32_000 < len(forest.token_ids) <= 33_000
    with MemoryLedger() as ledger:
        masks = [FlexLayout(forest, CPU).mask(window) for window in (None, 4096)]
    assert all(isinstance(mask, BlockMask) for mask in masks)
    assert 1 << 20 < ledger.peak <= 64 << 20, f"{ledger.peak / 2**20:.0f} MiB at {ledger.peak_op}"


def test_a_forest_of_whole_blocks_is_not_padded() -> None:
    forest = build_forest([[1] * BLOCK])
    assert pad_to_blocks(forest) is forest


@pytest.mark.slow
def test_one_kernel_serves_all_sizes_and_one_too_many_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph.forward

    kernel = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
    monkeypatch.setattr(module, "_compile_kernel", lambda: kernel)

    def attend(tokens: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        layout = FlexLayout(build_forest([[1] * tokens]), CPU)
        given = (t.transpose(0, 1)[None].to(dtype) for t in given_to(layout.token_ids.shape[1]))
        out: torch.Tensor = run_compiled(*given, block_mask=layout.mask(window), scale=None, enable_gqa=True)
        return out

    for tokens in (200, 300, 500, 900, 1300, 1500, 2500):
        attend(tokens, None, torch.float32)
    assert len(compiled) <= 2
    monkeypatch.setattr(module, "KERNELS", len(compiled))
    with pytest.raises(UserError, match=r"TORCH_LOGS=recompiles says what; --learner\.packing padded"):
        attend(200, 7, torch.float64)
    torch.compiler.reset()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("window", [None, 7])
def test_on_a_gpu_the_kernel_has_the_gradients_too(window: int | None) -> None:
    forest, cuda = build_forest(sorted([0] * 300 + [n] * (50 * n) for n in range(1, 6))), torch.device("cuda")
    sides, count = [], len(forest.token_ids)
    for layout in (SdpaLayout(forest, cuda), FlexLayout(forest, cuda)):
        drawn = given_to(len(pad_to_blocks(forest).token_ids))
        given = [t[: layout.token_ids.shape[1]].cuda().requires_grad_() for t in drawn]
        sides.append([values[:count] for values in outcome(layout, given, window)])
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
