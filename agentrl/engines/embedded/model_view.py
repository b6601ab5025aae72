"""The engine's view of the policy: the same parameters, the engine's attention, and a proof that both agree."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from agentrl.engines.embedded.fused_llama import FusedForward, can_fuse
from agentrl.engines.embedded.kv_cache import SLOT_ATTENTION, ForwardBatch, SlotCache, attend_slots, use_batch
from agentrl.errors import UserError
from agentrl.models.capabilities import Capabilities
from agentrl.models.lm_head import NotProven, build_lm_head, find_backbone, replace_attention

AttentionInterface.register(SLOT_ATTENTION, attend_slots)


class InferenceModel:
    """A second module tree over a model's parameters, in inference mode. Called with a batch, it gives hidden states.

    Args:
        model: its parameters are shared, unless it is to be a ``snapshot``.

    Raises:
        UserError: the engine does not compute what the model computes (`agentrl.models.capabilities`).
    """

    def __init__(self, model: PreTrainedModel, *, snapshot: bool) -> None:
        self.snapshot = snapshot
        self._adopt(model)

    @property
    def config(self) -> PreTrainedConfig:
        """Return the settings of the language model."""
        return self.model.config.get_text_config()

    @property
    def max_context(self) -> int:
        """Return how many positions a row may have."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":  # beyond this the angles depend on the longest row of the batch
            return int(rope["original_max_position_embeddings"])
        return getattr(self.config, "max_position_embeddings", None) or 1 << 20

    def new_cache(self) -> SlotCache:
        """Make an empty cache of the shape that the model's attention fills."""
        return _new_cache(self.model)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Compute the hidden states of a batch, (tokens, width)."""
        if self.fused is not None:
            return self.fused(batch)
        return run_batch(self.model, batch)

    def update(self, model: PreTrainedModel) -> bool:
        """Read the weights again. Return True if it is another model now, or has other parameters."""
        ours, theirs = list(self.model.parameters()), list(model.parameters())
        same = self.snapshot or (len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True)))
        if not same:
            self._adopt(model)
            return True
        if self.snapshot:
            with torch.no_grad():
                for own, new in zip(ours, theirs, strict=True):
                    own.copy_(new)
        if self.fused is not None:
            self.fused.refresh()
        return False

    def _adopt(self, model: PreTrainedModel) -> None:
        tensors = {} if self.snapshot else {id(t): t for t in [*model.parameters(), *model.buffers()]}
        self.model = copy.deepcopy(model, memo=tensors).eval()
        self.lm_head = build_lm_head(self.model)
        proofs = Capabilities(self.model)
        try:
            proofs.prove_kind(run_through_slots)
            self.fused = FusedForward(self.model, self.max_context) if can_fuse(self.model) else None
            if self.fused is not None and not proofs.agrees(self._run_fused):
                self.fused = None
            if self.fused is None:
                proofs.prove_itself(run_through_slots)
        except NotProven as reason:
            raise UserError(
                f"the embedded engine cannot run {proofs.name}: {reason}. vLLM may: --engine vllm (docs/models.md)"
            ) from None
        self.model.set_attn_implementation(SLOT_ATTENTION)

    def _run_fused(self, model: PreTrainedModel, rows: list[list[int]]) -> list[Tensor]:
        return _run_in_passes(self, self.new_cache(), rows)


def _new_cache(model: PreTrainedModel) -> SlotCache:
    """Make an empty cache of the shape that a model's attention fills."""
    first = next(model.parameters())
    return SlotCache(model.config.get_text_config(), first.dtype, first.device)


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
