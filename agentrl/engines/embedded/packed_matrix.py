"""A weight matrix as the engine multiplies by it: packed for the CPU by oneDNN where that pays, else as it is.

A packed matrix is a copy. On SmolLM2-135M's matrices its product takes a half to a third of the time that the same
product takes in the order in which the model keeps them, from a single row on (benchmarks/products.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

SMALL = 1 << 17  # elements; below it calling oneDNN takes longer than it saves
ROWS = 16  # the number of rows that a matrix is packed for; it serves any


class PackedMatrix:
    """The function from x to ``x @ weight.T + bias``, (rows, out).

    Args:
        weight: (out, in).
        bias: (out,), or None.
        dtype: of the product: of what is multiplied, and of what comes out.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype or weight.dtype
        self.weight = weight.detach().to(self.dtype)
        self.bias = None if bias is None else bias.detach().to(self.dtype)
        self.is_packed = can_pack(self.weight)
        if self.is_packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        if self.is_packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return product
        return linear(x, self.weight, self.bias)


def can_pack(weight: Tensor) -> bool:
    """Return True for a matrix large enough, in a precision that this CPU's oneDNN packs."""
    if weight.device.type != "cpu" or weight.numel() < SMALL:
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):  # elsewhere it is another library
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and multiplies_bf16())


def multiplies_bf16() -> bool:
    """Return True for a CPU whose oneDNN multiplies in bfloat16; elsewhere that is right, and slower than float32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
