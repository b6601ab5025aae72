"""A packed matrix multiplies as torch does, whatever it was packed for; small ones stay as they are."""

import pytest
import torch
from torch.nn.functional import linear

from agentrl.engines.embedded.packed_matrix import SMALL, PackedMatrix, can_pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 16, 33, 200])
def test_it_multiplies_as_a_linear_layer_does(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((rows, 320), (500, 320), (500,)))
    expected = linear(x.to(dtype).double(), weight.to(dtype).double(), bias.to(dtype).double())
    error = (PackedMatrix(weight, bias, dtype)(x).double() - expected).abs().max() / expected.abs().max()
    assert error < (1e-6 if dtype == torch.float32 else 2**-8)


def test_a_small_one_and_one_in_double_precision_share_the_weight() -> None:
    for weight in (torch.randn(64, SMALL // 64 - 1), torch.randn(500, 320, dtype=torch.float64)):
        assert not can_pack(weight)
        assert PackedMatrix(weight).weight.data_ptr() == weight.data_ptr()


def test_a_packed_one_does_not_change_with_the_weight() -> None:
    weight = torch.ones(512, 512)
    if not can_pack(weight):
        pytest.skip("this CPU's matrices stay as they are")
    matrix = PackedMatrix(weight)
    weight.zero_()
    assert bool((matrix(torch.ones(1, 512)) == 512).all())
