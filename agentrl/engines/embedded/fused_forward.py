"""The forward pass of decoders that are built like Llama, in few operations, on packed matrices.

Where a model is small, the time goes into calling operations, not into computing them. The differences to
transformers: one matrix for queries, keys and values; the two halves of a head's dimensions interleaved in that
matrix (attention does not care), so that rotating is one complex multiplication in place; sums in place. What models
add to Llama is read off their modules: norms of queries and keys, norms behind attention and MLP, sliding windows,
rotations by the type of a layer or none, multipliers. The result is compared with the model's own output when the
engine is made.

Only products are in the precision that is asked for: what a layer adds to, norms, rotations and attention are in
float32.

    hidden        (tokens, width)
    qkv           (tokens, heads + 2 x kv heads, dim)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from agentrl.engines.embedded.kv_cache import ForwardBatch
from agentrl.engines.embedded.packed_matrix import PackedMatrix
from agentrl.models.lora import compute_merged_weight, is_plain_linear

FAMILY = {
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("SmolLM3ForCausalLM", "GraniteForCausalLM", "Gemma3ForCausalLM"),
}
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # the angles depend on nothing but the position


class _Norm:
    """Root mean square norm: x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.share = weight, 1.0 / weight.shape[-1]
        self.eps = torch.tensor(eps, dtype=weight.dtype, device=weight.device)

    @classmethod
    def read(cls, module: nn.Module) -> _Norm:
        """Read a module's norm. What it multiplies by is what it makes of ones: Gemma's adds 1 to its weight."""
        weight: Any = module.weight
        eps = float(getattr(module, "variance_epsilon", None) or module.eps)  # type: ignore[arg-type]
        ones = torch.ones(weight.shape, dtype=find_precision(weight), device=weight.device)
        return cls(module(ones) * (1.0 + eps) ** 0.5, eps)

    def inverse(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(self.eps, length, length, value=self.share).rsqrt_()

    def __call__(self, x: Tensor) -> Tensor:
        return (x * self.inverse(x)).mul_(self.weight)


class _Layer(NamedTuple):
    attention_norm: _Norm
    qkv: PackedMatrix  # (width, (heads + 2 x kv heads) x dim)
    qk_norm: _Norm | None  # (heads + kv heads, dim)
    rotations: str | None  # the type of the layer, by which `FusedForward.rotations` has them
    scale: float
    window: int | None
    out: PackedMatrix
    out_norm: _Norm | None
    mlp_norm: _Norm
    gate: PackedMatrix
    up: PackedMatrix
    activation: Callable[[Tensor], Tensor]
    down: PackedMatrix
    down_norm: _Norm | None


class FusedForward:
    """The fused forward pass: from a batch to the hidden state of each of its tokens, (tokens, width).

    Args:
        dtype: of the products; by default that of the model's weights.
    """

    def __init__(self, model: PreTrainedModel, max_context: int, dtype: torch.dtype | None = None) -> None:
        self.model = model
        self.base: Any = model.model
        weight = self.base.embed_tokens.weight
        self.dtype, self.precision = dtype or weight.dtype, find_precision(weight)
        positions = torch.arange(max_context, device=weight.device)[None]
        like = torch.ones((), dtype=self.precision, device=weight.device)
        types = [_read_rotations(layer.self_attn) for layer in self.base.layers]
        self.rotations: dict[str, Tensor] = {}  # of a type of layers, (positions, 1, dim / 2)
        half = 0
        for kind in {kind for kind in types if kind is not None}:
            cos, sin = self.base.rotary_emb(like, positions, *([kind] if kind else []))  # (1, positions, dim)
            half = cos.shape[-1] // 2  # the second half repeats the first
            self.rotations[kind] = torch.complex(cos[0, :, None, :half], sin[0, :, None, :half])
        self.interleave = torch.arange(2 * half, device=weight.device).view(2, half).T.flatten()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the model's weights again."""
        self.layers: list[_Layer] = []  # no layer is held twice
        self.norm = _Norm.read(self.base.norm)
        self.layers.extend(self._read_layer(layer) for layer in self.base.layers)

    def release(self) -> None:
        """Give back the memory of what was packed; the next pass reads the weights again."""
        self.layers.clear()

    def _read_layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        names = "input_layernorm", "post_attention_layernorm"
        before, between = (_Norm.read(getattr(layer, name)) for name in names)
        is_silu = getattr(self.model.config, "hidden_act", None) == "silu"
        four = hasattr(layer, "pre_feedforward_layernorm")  # then the second is behind attention
        return _Layer(
            attention_norm=before,
            qkv=self._join_qkv(attention),
            qk_norm=self._join_qk_norm(attention) if hasattr(attention, "q_norm") else None,
            rotations=_read_rotations(attention),
            scale=attention.scaling,
            window=getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)),
            out=self._read_matrix(attention.o_proj, layer),
            out_norm=between if four else None,
            mlp_norm=_Norm.read(layer.pre_feedforward_layernorm) if four else between,
            gate=self._read_matrix(mlp.gate_proj),
            up=self._read_matrix(mlp.up_proj),
            activation=partial(silu, inplace=True) if is_silu else mlp.act_fn,
            down=self._read_matrix(mlp.down_proj, layer),
            down_norm=_Norm.read(layer.post_feedforward_layernorm) if four else None,
        )

    def _read_matrix(self, linear: Any, layer: Any = None) -> PackedMatrix:
        """Read a matrix; one whose product a ``layer`` adds to its input has the layer's multiplier in it."""
        multiplier = getattr(layer, "residual_multiplier", 1.0)
        weight, bias = compute_merged_weight(linear), linear.bias
        if multiplier != 1.0:
            weight, bias = weight * multiplier, None if bias is None else bias * multiplier
        return PackedMatrix(weight, bias, self.dtype)

    def _join_qkv(self, attention: Any) -> PackedMatrix:
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        weights = [*(self._interleave(compute_merged_weight(p)) for p in (q, k)), compute_merged_weight(v)]
        biases = [self._interleave(p.bias) for p in (q, k)] + [v.bias] if q.bias is not None else None
        return PackedMatrix(torch.cat(weights), torch.cat(biases) if biases else None, self.dtype)

    def _join_qk_norm(self, attention: Any) -> _Norm:
        q, k = _Norm.read(attention.q_norm), _Norm.read(attention.k_norm)
        dim = attention.head_dim
        weights = [
            self._interleave(norm.weight).expand(projection.out_features // dim, dim)
            for norm, projection in ((q, attention.q_proj), (k, attention.k_proj))
        ]
        return _Norm(torch.cat(weights), float(q.eps))

    def _interleave(self, weight: Tensor) -> Tensor:
        """Interleave the halves of each head: 0 1 2 3 | 4 5 6 7 becomes 0 4 1 5 2 6 3 7."""
        heads = weight.view(-1, len(self.interleave), *weight.shape[1:])
        return heads[:, self.interleave].flatten(0, 1)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        if not self.layers:
            self.refresh()
        x = self.base.embed_tokens(batch.ids).to(self.precision) * getattr(self.base, "embedding_multiplier", 1.0)
        rotations = {kind: table[batch.positions] for kind, table in self.rotations.items()}  # (tokens, 1, dim / 2)
        for index, layer in enumerate(self.layers):
            h = layer.attention_norm(x)
            _add(x, layer.out(self._attend(index, layer, layer.qkv(h), rotations, batch)), layer.out_norm)
            h = layer.mlp_norm(x).to(self.dtype)  # for both
            _add(x, layer.down(layer.activation(layer.gate(h)).mul_(layer.up(h))), layer.down_norm)
        return self.norm(x).to(self.base.embed_tokens.weight.dtype)

    def _attend(
        self, index: int, layer: _Layer, projected: Tensor, rotations: dict[str, Tensor], batch: ForwardBatch
    ) -> Tensor:
        kv_heads, dim = batch.cache.kv_heads, batch.cache.dim
        qkv = projected.to(self.precision).view(len(projected), -1, dim)
        qk = qkv[:, :-kv_heads]
        if layer.qk_norm is not None:
            qk.mul_(layer.qk_norm.inverse(qk)).mul_(layer.qk_norm.weight)
        if layer.rotations is not None:
            torch.view_as_complex(qk.view(*qk.shape[:2], -1, 2)).mul_(rotations[layer.rotations])
        batch.write(index, qkv[:, -2 * kv_heads :])
        return batch.attend(index, qkv[:, : -2 * kv_heads], layer.scale, layer.window).flatten(1)


def _add(x: Tensor, product: Tensor, norm: _Norm | None) -> None:
    """Add to a sum what a layer computed, normed where the model does."""
    x.add_(product if norm is None else norm(product.to(x.dtype)))


def _read_rotations(attention: Any) -> str | None:
    """Return the type of a layer where each type has rotations of its own, else ``""``; None for no rotation."""
    if not getattr(attention, "use_rope", True):
        return None
    return attention.layer_type if _has_rope_by_type(attention.config) else ""


def _has_rope_by_type(config: Any) -> bool:
    return any(isinstance(value, dict) for value in config.rope_parameters.values())


def find_precision(weight: Tensor) -> torch.dtype:
    """Return the precision of all but the products: float32, or more for a model that has more."""
    return torch.promote_types(weight.dtype, torch.float32)


def can_fuse(model: PreTrainedModel) -> bool:
    """Return True for a plain model of the family, without adapters but LoRA. What it computes is still to be shown."""
    if type(model).__name__ not in FAMILY:
        return False
    config, base = model.config, model.model
    linears = [
        getattr(part, name)
        for layer in base.layers
        for part, names in (
            (layer.self_attn, "q_proj k_proj v_proj o_proj"),
            (layer.mlp, "gate_proj up_proj down_proj"),
        )
        for name in names.split()
    ]
    ropes = config.rope_parameters.values() if _has_rope_by_type(config) else [config.rope_parameters]
    return (
        all(is_plain_linear(linear) for linear in linears)
        and getattr(config, "attn_logit_softcapping", None) is None
        and all(rope is None or rope.get("rope_type", "default") in STATIC_ROPE for rope in ropes)
    )
