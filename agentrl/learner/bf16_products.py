"""Products in bfloat16: the linear layers of a model in single precision multiply in half of it, forward and backward.

Weights, gradients, norms, the residual stream, attention and the loss stay in single precision, and so do the logits:
of a logit of 20 bfloat16 knows no change under 0.06. torch's autocast puts attention into bfloat16 too, whose backward
pass is several times slower on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from transformers import PreTrainedModel

from agentrl.errors import UserError

BF16 = torch.bfloat16


class _Bf16Linear(torch.autograd.Function):
    """A linear layer of single precision whose three products are in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x.to(BF16)
        ctx.save_for_backward(x, weight)
        y = linear(x, weight.to(BF16)).float()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        half = rows.to(BF16)
        x_grad = (half @ weight.to(BF16)).float().view(x.shape) if wants_x else None
        weight_grad = (half.T @ x.reshape(-1, x.shape[-1])).float() if wants_weight else None
        return x_grad, weight_grad, rows.sum(0) if wants_bias else None


def find_linear_layers(model: PreTrainedModel) -> list[nn.Linear]:
    """Find the linear layers whose products can be in bfloat16: all in single precision but the output layer.

    Raises:
        UserError: there is none.
    """
    head, name = model.get_output_embeddings(), type(model).__name__
    layers = [m for m in model.modules() if type(m) is nn.Linear and m is not head]
    found = [m for m in layers if m.weight.dtype == torch.float32]
    if found:
        return found
    why = "they are in half precision already (dtype)" if layers else "it has none of torch's own"
    raise UserError(f"learner.bf16: no linear layer of {name} would change: {why}; leave it out")


@contextmanager
def multiply_in_bf16(layers: Sequence[nn.Linear]) -> Iterator[None]:
    """Let layers multiply in bfloat16 until the block ends."""
    for layer in layers:
        layer.forward = partial(_multiply, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _multiply(layer: nn.Linear, x: Tensor) -> Tensor:
    y: Tensor = _Bf16Linear.apply(x, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    return y


def has_bf16_products(device: torch.device) -> bool:
    """Return True for a device that multiplies in bfloat16 by instructions of its own."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in names)
