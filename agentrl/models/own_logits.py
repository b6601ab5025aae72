"""A model's own logits, by its own forward pass over one row alone: what every other way is compared with."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel


def compute_own_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Run the model over a row; the logits behind each of its tokens, (length, vocabulary)."""
    logits: Tensor = model(input_ids=_to_tensor(model, token_ids), use_cache=False).logits
    return logits[0]


def compute_next_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Run the model over a row as its ``generate`` does without a cache; the logits of the next token, (vocabulary,).

    For a model whose tokens depend on those behind them this is not the row of `compute_own_logits`: some look at a
    mask that stands where the next token will.
    """
    ids = _to_tensor(model, token_ids)
    inputs = model.prepare_inputs_for_generation(ids, is_first_iteration=True, use_cache=False)
    logits: Tensor = model(**{name: value for name, value in inputs.items() if value is not None}).logits
    return logits[0, -1]


def accepts_argument(model: PreTrainedModel, name: str) -> bool:
    """Return True if the model's forward pass has an argument of that name."""
    return name in inspect.signature(model.forward).parameters


def _to_tensor(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(token_ids)], device=model.get_input_embeddings().weight.device)
