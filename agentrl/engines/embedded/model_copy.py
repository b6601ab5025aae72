"""A second module tree over a model's parameters, in inference mode: what an engine may change without the learner."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

_LIMITS = ("max_position_embeddings", "max_target_positions", "n_positions")  # of a configuration


class ModelCopy:
    """A copy of a model's modules.

    Args:
        model: its parameters are shared, unless it is to be a ``snapshot``.
    """

    def __init__(self, model: PreTrainedModel, *, snapshot: bool) -> None:
        tensors = {} if snapshot else {id(t): t for t in [*model.parameters(), *model.buffers()]}
        tensors |= {id(t): t.detach() for t in _find_computed(model)}
        self.model, self.snapshot = copy.deepcopy(model, memo=tensors).eval(), snapshot

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
        limits = (getattr(self.config, name, None) for name in _LIMITS)
        limit = next((int(n) for n in limits if n and n > 0), 1 << 20)
        return limit - _count_padding_positions(self.model)

    def cast(self, dtype: torch.dtype) -> None:
        """Hold the weights in another precision from now on: then they are a snapshot. Weights in 4 bits stay."""
        if all(p.dtype == dtype or not p.is_floating_point() for p in self.model.parameters()):
            return
        if not self.snapshot:
            self.model, self.snapshot = copy.deepcopy(self.model), True
        for parameter in self.model.parameters():  # buffers stay: angles of rotations would suffer
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)

    def update(self, model: PreTrainedModel) -> bool:
        """Read the weights again. Return False if it is another model now, or has other parameters."""
        ours, theirs = list(self.model.parameters()), list(model.parameters())
        if self.snapshot:
            with torch.no_grad():
                for own, new in zip(ours, theirs, strict=True):
                    own.copy_(new)
            return True
        return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


def _find_computed(model: nn.Module) -> list[Tensor]:
    """Find the tensors of a past pass that modules still hold, with a graph of autograd, which is not copied."""
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return [tensor for tensor in held if not tensor.is_leaf]


def _count_padding_positions(model: nn.Module) -> int:
    """Count the positions that a table of positions gives to padding: RoBERTa's begin behind it."""
    tables = (module for name, module in model.named_modules() if name.endswith("position_embeddings"))
    padding = (table.padding_idx for table in tables if isinstance(table, nn.Embedding))
    return max((index + 1 for index in padding if index is not None), default=0)
