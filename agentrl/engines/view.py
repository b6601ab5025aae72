"""The engine's own view of the policy: the same parameters, the engine's attention, and a proof that it is the same."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from agentrl.engines.fused import FusedForward, can_fuse
from agentrl.engines.kv import ATTENTION, Plan, SlotCache, attend, following
from agentrl.errors import UserError
from agentrl.learner.logprobs import output_head

AttentionInterface.register(ATTENTION, attend)


class View:
    """A second module tree over a model's parameters, in inference mode. Called with a plan, it gives hidden states.

    Args:
        model: its parameters are shared, unless it is to be a ``snapshot``.

    Raises:
        UserError: the engine would not compute what the model computes; found by comparing on a few tokens.
    """

    def __init__(self, model: Any, *, snapshot: bool) -> None:
        self.snapshot = snapshot
        self._adopt(model)

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def max_context(self) -> int:
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":  # beyond this the angles depend on the longest row of the batch
            return int(rope["original_max_position_embeddings"])
        return getattr(self.config, "max_position_embeddings", None) or 1 << 20

    def new_cache(self) -> SlotCache:
        first = next(self.model.parameters())
        return SlotCache(self.config, first.dtype, first.device)

    def __call__(self, plan: Plan) -> Tensor:
        """(tokens, width)"""
        if self.fused is not None:
            return self.fused(plan)
        with following(plan):
            states: Tensor = self.model.base_model(
                input_ids=plan.ids[None], position_ids=plan.positions[None], use_cache=False
            ).last_hidden_state
        return states[0]

    def update(self, model: Any) -> bool:
        """Read the weights again. Whether it is another model now, or its parameters were replaced by others."""
        ours, theirs = list(self.model.parameters()), list(model.parameters())
        same = self.snapshot or (len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True)))
        if not same:
            self._adopt(model)
            return True
        if self.snapshot:
            with torch.no_grad():
                for mine, new in zip(ours, theirs, strict=True):
                    mine.copy_(new)
        if self.fused is not None:
            self.fused.refresh()
        return False

    def _adopt(self, model: Any) -> None:
        tensors = {} if self.snapshot else {id(t): t for t in [*model.parameters(), *model.buffers()]}
        self.model = copy.deepcopy(model, memo=tensors).eval()
        self.head = output_head(self.model)
        vocabulary = int(model.get_input_embeddings().num_embeddings)
        ids = torch.randint(vocabulary, (2, 12), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            expected = self.model(input_ids=ids.to(model.device), use_cache=False).logits[[0, 1], [7, 11]]
            self.model.set_attn_implementation(ATTENTION)
            if self.config._attn_implementation != ATTENTION:
                raise UserError(
                    f"{type(model).__name__} does not use transformers' attention interface, "
                    "which the embedded engine needs"
                )
            self.fused = FusedForward(self.model, self.max_context) if can_fuse(self.model) else None
            if self.fused is not None and not self._agrees(ids.tolist(), expected):
                self.fused = None
            if self.fused is None and not self._agrees(ids.tolist(), expected):
                raise UserError(f"{type(model).__name__} computes something else in the embedded engine")

    def _agrees(self, ids: list[list[int]], expected: Tensor) -> bool:
        """Two rows in three passes, so that prompts, single tokens and continuations all occur."""
        (a, b), cache = ids, self.new_cache()
        try:
            self(Plan(cache, [a[:5], b[:4]], [0, 0]))
            self(Plan(cache, [a[5:6], b[4:10]], [5, 4]))
            found = self.head(self(Plan(cache, [a[6:8], b[10:12]], [6, 10]))[[1, 3]])
        except NotImplementedError as error:
            raise UserError(f"the embedded engine cannot run {type(self.model).__name__}: {error}") from None
        share = 1e-3 if expected.dtype == torch.float32 else 0.1
        return bool((found - expected).float().square().mean().sqrt() <= share * expected.float().std())
