"""Layers of weights in 4 bits whose bytes can be cut into shards (QLoRA, arXiv 2305.14314; FSDP-QLoRA).

bitsandbytes' parameter knows how it is to be read, and is lost where shards are gathered: here the layer knows it, and
the parameter is bytes. The scales, a byte for 64 weights, stay whole in each process.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

_TENSORS = ("absmax", "code", "offset")


def hold_as_bytes(model: nn.Module) -> list[Tensor]:
    """Turn the weights in 4 bits into plain parameters of bytes; return the scales that their layers keep."""
    scales: list[Tensor] = []
    for layer in _list_quantized(model):
        state, data = layer.weight.quant_state, layer.weight.data
        layer.weight = nn.Parameter(data, requires_grad=False)
        layer.forward = partial(_forward, layer, state)
        scales += _list_scales(state)
    return scales


def _list_quantized(model: nn.Module) -> Iterator[Any]:
    """List the layers whose own weight is in 4 bits; an adapter around one shows the same weight."""
    return (m for m in model.modules() if getattr(m._parameters.get("weight"), "quant_state", None) is not None)


def _list_scales(state: Any) -> list[Tensor]:
    """List the tensors that bytes are read with: scales, and those of the scales."""
    own = [getattr(state, name) for name in _TENSORS if isinstance(getattr(state, name, None), Tensor)]
    return own + ([] if state.state2 is None else _list_scales(state.state2))


def _forward(layer: Any, state: Any, x: Tensor) -> Tensor:
    """Compute the layer with the bytes that it has now, as bitsandbytes' ``Linear4bit`` does."""
    from bitsandbytes import matmul_4bit

    dtype = layer.compute_dtype or x.dtype
    bias = None if layer.bias is None else layer.bias.to(dtype)
    product: Tensor = matmul_4bit(x.to(dtype), layer.weight, bias=bias, quant_state=state)
    return product.to(x.dtype)
