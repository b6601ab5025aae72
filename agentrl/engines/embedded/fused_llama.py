"""The forward pass of the Llama family (Llama, Mistral, Qwen2, Qwen3) in few operations, for small models.

Where a model is small, the time goes into calling operations, not into computing them. The differences to
transformers: one matrix for queries, keys and values; the two halves of a head's dimensions interleaved in that
matrix (attention does not care), so that rotating is one complex multiplication in place; sums in place. The
result is compared with the model's own output when the engine is made.

    hidden        (tokens, width)
    qkv           (tokens, heads + 2 x kv heads, dim)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu
from transformers import PreTrainedModel

from agentrl.engines.embedded.kv_cache import ForwardBatch
from agentrl.models.lora import compute_merged_weight, is_plain_linear

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # the angles depend on nothing but the position


class _Norm:
    """Root mean square norm: x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.share = weight, 1.0 / weight.shape[-1]
        self.eps = torch.tensor(eps, device=weight.device)

    def inverse(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(self.eps, length, length, value=self.share).rsqrt_()

    def __call__(self, x: Tensor) -> Tensor:
        return (x * self.inverse(x)).mul_(self.weight)


class _Layer(NamedTuple):
    """Matrices stand transposed: (in, out)."""

    attention_norm: _Norm
    qkv: Tensor  # (width, (heads + 2 x kv heads) x dim)
    qkv_bias: Tensor | None
    qk_norm: _Norm | None  # (heads + kv heads, dim)
    scale: float
    out: Tensor
    mlp_norm: _Norm
    gate: Tensor
    up: Tensor
    down: Tensor


class FusedForward:
    """The fused forward pass: from a batch to the hidden state of each of its tokens, (tokens, width)."""

    def __init__(self, model: PreTrainedModel, max_context: int) -> None:
        self.model = model
        weight = model.model.embed_tokens.weight
        positions = torch.arange(max_context, device=weight.device)[None]
        cos, sin = model.model.rotary_emb(weight, positions)  # (1, positions, dim), the second half repeats the first
        half = cos.shape[-1] // 2
        self.rotations = torch.complex(cos[0, :, None, :half], sin[0, :, None, :half])  # (positions, 1, dim / 2)
        self.interleave = torch.arange(2 * half, device=weight.device).view(2, half).T.flatten()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the model's weights again."""
        base = self.model.model
        self.embedding = base.embed_tokens.weight.detach()
        self.norm = _Norm(base.norm.weight.detach(), base.norm.variance_epsilon)
        self.layers = [self._layer(layer) for layer in base.layers]

    def _layer(self, layer: LlamaDecoderLayer) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        biases = [self._interleave(p.bias) for p in (q, k)] + [v.bias] if q.bias is not None else None
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        return _Layer(
            _Norm(first.weight.detach(), first.variance_epsilon),
            torch.cat(
                [
                    self._interleave(compute_merged_weight(q)),
                    self._interleave(compute_merged_weight(k)),
                    compute_merged_weight(v),
                ]
            ).T,
            torch.cat(biases) if biases else None,
            self._qk_norm(attention) if hasattr(attention, "q_norm") else None,
            attention.scaling,
            compute_merged_weight(attention.o_proj).T,
            _Norm(second.weight.detach(), second.variance_epsilon),
            compute_merged_weight(mlp.gate_proj).T,
            compute_merged_weight(mlp.up_proj).T,
            compute_merged_weight(mlp.down_proj).T,
        )

    def _qk_norm(self, attention: LlamaAttention) -> _Norm:
        dim = attention.head_dim
        q, k = (
            self._interleave(n.weight).expand(p.out_features // dim, dim)
            for n, p in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj))
        )
        return _Norm(torch.cat([q, k]), attention.q_norm.variance_epsilon)

    def _interleave(self, weight: Tensor) -> Tensor:
        """Interleave the halves of each head: 0 1 2 3 | 4 5 6 7 becomes 0 4 1 5 2 6 3 7."""
        heads = weight.view(-1, len(self.interleave), *weight.shape[1:])
        return heads[:, self.interleave].flatten(0, 1)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        x = embedding(batch.ids, self.embedding)
        rotations = self.rotations[batch.positions]  # (tokens, 1, dim / 2)
        for index, layer in enumerate(self.layers):
            x.addmm_(self._attention(index, layer, layer.attention_norm(x), rotations, batch), layer.out)
            h = layer.mlp_norm(x)
            x.addmm_(silu(h @ layer.gate, inplace=True).mul_(h @ layer.up), layer.down)
        return self.norm(x)

    def _attention(self, index: int, layer: _Layer, h: Tensor, rotations: Tensor, batch: ForwardBatch) -> Tensor:
        kv_heads, dim = batch.cache.kv_heads, batch.cache.dim
        projected = h @ layer.qkv if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, h, layer.qkv)
        qkv = projected.view(len(h), -1, dim)
        qk = qkv[:, :-kv_heads]
        if layer.qk_norm is not None:
            qk.mul_(layer.qk_norm.inverse(qk)).mul_(layer.qk_norm.weight)
        torch.view_as_complex(qk.view(*qk.shape[:2], -1, 2)).mul_(rotations)
        batch.write(index, qkv[:, -2 * kv_heads :])
        return batch.attend(index, qkv[:, : -2 * kv_heads], layer.scale).flatten(1)


def can_fuse(model: PreTrainedModel) -> bool:
    """Return True for a plain model of the family: float32, no sliding windows, no adapters but LoRA."""
    if type(model).__name__ not in FAMILY or any(p.dtype != torch.float32 for p in model.parameters()):
        return False
    config, layers = model.config, model.model.layers
    linears = [
        (getattr(part, name), name in ("o_proj", "down_proj", "gate_proj", "up_proj"))
        for layer in layers
        for part, names in (
            (layer.self_attn, "q_proj k_proj v_proj o_proj"),
            (layer.mlp, "gate_proj up_proj down_proj"),
        )
        for name in names.split()
    ]
    return (
        all(is_plain_linear(linear) and not (plain and linear.bias is not None) for linear, plain in linears)
        and getattr(config, "sliding_window", None) is None
        and config.hidden_act == "silu"
        and config.rope_parameters.get("rope_type", "default") in STATIC_ROPE
    )
