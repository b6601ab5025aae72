"""The engine's view of the policy: the same parameters, the engine's attention, and a proof that both agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from agentrl.engines.embedded.batch import ContinuousBatch
from agentrl.engines.embedded.fused_forward import FusedForward, can_fuse
from agentrl.engines.embedded.kv_cache import (
    SLOT_ATTENTION,
    ForwardBatch,
    SessionCache,
    SlotCache,
    attend_slots,
    use_batch,
)
from agentrl.engines.embedded.model_copy import ModelCopy
from agentrl.engines.embedded.packed_matrix import PackedMatrix
from agentrl.learner.activation_memory import read_memory
from agentrl.models.capabilities import Capabilities
from agentrl.models.lm_head import LmHead, build_lm_head, find_backbone, has_fp32_head, replace_attention
from agentrl.models.lora import compute_merged_weight, is_plain_linear

CACHE_SHARE = 8  # of all memory, one part in so many for keys and values of running rows: more rows wait
KEEP_SHARE = 16  # and for those of sessions between their turns

AttentionInterface.register(SLOT_ATTENTION, attend_slots)


class InferenceModel(ModelCopy):
    """A model whose attention is the engine's. Called with a batch, it gives hidden states.

    Args:
        model: its parameters are shared, unless it is to be a ``snapshot``.
        dtype: of the products; by default that of the model's weights.

    Raises:
        NotProven: the engine does not compute what the model computes (`agentrl.models.capabilities`).
    """

    def __init__(self, model: PreTrainedModel, *, snapshot: bool, dtype: torch.dtype | None = None) -> None:
        super().__init__(model, snapshot=snapshot)
        self._own_head = build_lm_head(self.model)
        self.dtype = dtype or next(model.parameters()).dtype
        proofs = Capabilities(self.model)
        proofs.prove_kind(run_through_slots)
        self.fused = self._fuse(proofs)
        if self.fused is None:
            proofs.prove_itself(run_through_slots)
            self.cast(self.dtype)
            self._own_head = replace(self._own_head, layer=self.model.get_output_embeddings())
        self.model.set_attn_implementation(SLOT_ATTENTION)
        self._lm_head: LmHead | None = self._read_head()

    def _fuse(self, proofs: Capabilities) -> FusedForward | None:
        """Build the fused pass where it is shown to compute what the model does; in the model's own precision."""
        if not can_fuse(self.model):
            return None
        if not (proofs.holds(lambda: proofs.prove_kind(run_fused)) and proofs.agrees(run_fused)):
            return None
        return FusedForward(self.model, self.max_context, self.dtype)

    @property
    def lm_head(self) -> LmHead:
        """Return the output layer."""
        if self._lm_head is None:
            self._lm_head = self._read_head()
        return self._lm_head

    def _read_head(self) -> LmHead:
        """Pack the output layer where the pass is fused, in the precision of the other products or its own float32."""
        layer = self.model.get_output_embeddings()
        if self.fused is None or not (self._own_head.linear is layer or is_plain_linear(layer)):
            return self._own_head
        dtype = torch.float32 if has_fp32_head(self.model) else self.dtype
        return replace(self._own_head, layer=PackedMatrix(compute_merged_weight(layer), layer.bias, dtype))

    def new_cache(self) -> SlotCache:
        """Make an empty cache of the shape that the model's attention fills."""
        if self.fused is not None:
            return _new_cache(self.model, self.fused.precision)
        return _new_cache(self.model)

    def new_batch(self, capacity: int, prefill_tokens: int, keep_bytes: int) -> ContinuousBatch:
        """Make an empty batch over an empty cache."""
        cache = self.new_cache()
        total, _ = read_memory(cache.device)
        cache.max_bytes = total // CACHE_SHARE
        return ContinuousBatch(
            self, cache, SessionCache(min(keep_bytes, total // KEEP_SHARE)), capacity, prefill_tokens
        )

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Compute the hidden states of a batch, (tokens, width)."""
        if self.fused is not None:
            return self.fused(batch)
        return run_batch(self.model, batch)

    def update(self, model: PreTrainedModel) -> bool:
        """Read the weights again. Return False if it is another model now, or has other parameters."""
        same = super().update(model)
        if same and self.fused is not None:
            self.fused.refresh()
            self._lm_head = None  # before the other is there
            self._lm_head = self._read_head()
        return same

    def release(self) -> None:
        """Give back the memory of packed matrices; the next pass reads the weights again."""
        if self.fused is not None:
            self.fused.release()
            self._lm_head = None


def run_fused(model: PreTrainedModel, rows: list[list[int]]) -> list[Tensor]:
    """Run rows through a model's fused pass as the engine does; the states of each, (length, width)."""
    fused = FusedForward(model, max(map(len, rows)))
    return _run_in_passes(fused, _new_cache(model, fused.precision), rows)


def _new_cache(model: PreTrainedModel, dtype: torch.dtype | None = None) -> SlotCache:
    """Make an empty cache of the shape that a model's attention fills, in its precision or another."""
    first = next(model.parameters())
    return SlotCache(model.config.get_text_config(), dtype or first.dtype, first.device)


def run_batch(model: PreTrainedModel, batch: ForwardBatch) -> Tensor:
    """Run one pass of a model whose attention is the engine's; the states, (tokens, width)."""
    ids, positions = batch.ids[None], batch.positions[None]
    with use_batch(batch):
        states: Tensor = find_backbone(model)(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    return states[0]


def run_through_slots(model: PreTrainedModel, rows: list[list[int]]) -> list[Tensor]:
    """Run rows through a model as the engine does, in ragged passes; the states of each, (length, width)."""
    with replace_attention(model, SLOT_ATTENTION):
        return _run_in_passes(lambda batch: run_batch(model, batch), _new_cache(model), rows)


def _run_in_passes(run: Callable[[ForwardBatch], Tensor], cache: SlotCache, rows: list[list[int]]) -> list[Tensor]:
    """Run prompts, then continuations of any length, then single tokens; the states of each row, (length, width)."""
    cached, outputs = [0] * len(rows), [list[Tensor]() for _ in rows]
    for step in range(3):
        ends = [(len(row) // (n + 2), len(row) - 1, len(row))[step] for n, row in enumerate(rows)]
        new = [row[a:b] for row, a, b in zip(rows, cached, ends, strict=True)]
        parts = torch.split(run(ForwardBatch(cache, new, cached)), [len(tokens) for tokens in new])
        for states, part in zip(outputs, parts, strict=True):
            states.append(part)
        cached = ends
    return [torch.cat(states) for states in outputs]
