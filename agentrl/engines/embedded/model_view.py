"""The engine's own view of the policy: the same parameters, the engine's attention, and a proof that it is the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from agentrl.engines.fused import FusedForward, can_fuse
from agentrl.engines.kv import ATTENTION, Plan, SlotCache, attend, following
from agentrl.errors import UserError
from agentrl.learner.logprobs import output_head
from agentrl.models.capabilities import Capabilities, NotProven, inner_model

AttentionInterface.register(ATTENTION, attend)


class View:
    """A second module tree over a model's parameters, in inference mode. Called with a plan, it gives hidden states.

    Args:
        model: its parameters are shared, unless it is to be a ``snapshot``.

    Raises:
        UserError: the engine does not compute what the model computes (`agentrl.models.capabilities`).
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
        return new_cache(self.model)

    def __call__(self, plan: Plan) -> Tensor:
        """(tokens, width)"""
        if self.fused is not None:
            return self.fused(plan)
        return follow(self.model, plan)

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
        known = Capabilities(self.model)
        try:
            known.refuse_kind(through_slots)
            self.fused = FusedForward(self.model, self.max_context) if can_fuse(self.model) else None
            if self.fused is not None and not known.agrees(self._through_fused):
                self.fused = None
            if self.fused is None:
                known.refuse_itself(through_slots)
        except NotProven as why:
            raise UserError(
                f"the embedded engine cannot run {known.name}: {why}. vLLM may: --engine vllm (docs/models.md)"
            ) from None
        self.model.set_attn_implementation(ATTENTION)

    def _through_fused(self, model: Any, rows: list[list[int]]) -> list[Tensor]:
        return _in_passes(self, self.new_cache(), rows)


def new_cache(model: Any) -> SlotCache:
    """Make an empty cache of the shape that a model's attention fills."""
    first = next(model.parameters())
    return SlotCache(model.config.get_text_config(), first.dtype, first.device)


def follow(model: Any, plan: Plan) -> Tensor:
    """Run one pass of a model whose attention is the engine's; the states, (tokens, width)."""
    given = {"input_ids": plan.ids[None], "position_ids": plan.positions[None], "use_cache": False}
    with following(plan):
        states: Tensor = inner_model(model)(**given).last_hidden_state
    return states[0]


def through_slots(model: Any, rows: list[list[int]]) -> list[Tensor]:
    """Run rows through a model as the engine does, in ragged passes; the states of each, (length, width)."""
    with _attending(model):
        return _in_passes(lambda plan: follow(model, plan), new_cache(model), rows)


@contextmanager
def _attending(model: Any) -> Iterator[None]:
    """Inside, the model's attention is the engine's. Raises NotProven where it cannot be."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    try:
        model.set_attn_implementation(ATTENTION)
        if config._attn_implementation != ATTENTION:
            raise NotProven("it does not use transformers' attention interface")
        yield
    finally:
        model.set_attn_implementation(before)


def _in_passes(call: Callable[[Plan], Tensor], cache: SlotCache, rows: list[list[int]]) -> list[Tensor]:
    """Run prompts, then continuations of any length, then single tokens; the states of each row, (length, width)."""
    cached, found = [0] * len(rows), [list[Tensor]() for _ in rows]
    for step in range(3):
        ends = [(len(row) // (n + 2), len(row) - 1, len(row))[step] for n, row in enumerate(rows)]
        new = [row[a:b] for row, a, b in zip(rows, cached, ends, strict=True)]
        parts = torch.split(call(Plan(cache, new, cached)), [len(tokens) for tokens in new])
        for states, part in zip(found, parts, strict=True):
            states.append(part)
        cached = ends
    return [torch.cat(states) for states in found]
