"""The hidden states that predict the trained tokens of a micro-batch: two ways to the same numbers.

``padded_states`` is the plain way: rows side by side, padded on the right. ``forest_states`` passes what rows share
through the model once, and pads nothing; which models it is right for is found by comparing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl.learner.attention import attending, layout
from agentrl.learner.logprobs import causal_lm
from agentrl.learner.packing import MicroBatch, Pack, by_length, by_prefix

States = Callable[[Any, MicroBatch], Tensor]  # (model, batch) to (trained, width)


def padded_states(model: Any, batch: MicroBatch) -> Tensor:
    """Padding stands on the right, behind everything a real token attends to, so that no mask is needed."""
    device = next(model.parameters()).device
    ids = pad_sequence([torch.tensor(row.token_ids) for row in batch.rows], batch_first=True).to(device)
    hidden = causal_lm(model).base_model(input_ids=ids, use_cache=False).last_hidden_state
    rows, positions = torch.tensor(batch.trained, dtype=torch.int64, device=device).view(-1, 2).T
    picked: Tensor = hidden[rows, positions - 1]  # the state before a token predicts it
    return picked


def forest_states(model: Any, batch: MicroBatch) -> Tensor:
    """Raises NotImplementedError for a model whose attention cannot be replaced."""
    forest, device, model = batch.forest, next(model.parameters()).device, causal_lm(model)
    laid = layout(forest, device)
    given = {"input_ids": laid.token_ids, "position_ids": laid.positions, "use_cache": False}
    with attending(model):
        hidden = model.base_model(**given, forest=laid).last_hidden_state
    before = [forest.places[row][position - 1] for row, position in batch.trained]
    picked: Tensor = hidden[0].index_select(0, torch.tensor(before, dtype=torch.int64, device=device))
    return picked


class Packing(NamedTuple):
    """How rows become micro-batches, and how those go through the model."""

    pack: Pack
    states: States
    held: Callable[[Any], AbstractContextManager[None]]  # of the model, around forward and backward passes


PADDED = Packing(by_length, padded_states, nullcontext)
PREFIX = Packing(by_prefix, forest_states, attending)


def difference(model: Any, head: Callable[[Tensor], Tensor], batch: MicroBatch) -> str | None:
    """Why the forest's states of a batch, or a gradient through them, are not the padded ones; None where they are."""
    training = model.training
    model.eval()  # dropout would differ
    try:
        found, gradient = _probed(forest_states, model, head, batch)
    except Exception as error:  # whatever it is, the plain way goes on without it
        return f"{type(error).__name__}: {error}".splitlines()[0].removeprefix("NotImplementedError: ")
    finally:
        model.train(training)
    wanted, other = _probed(padded_states, model, head, batch)
    allowed = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1
    for what, off in (("logits are", _off(found, wanted)), ("gradient is", _off(gradient, other) / 10)):
        if not off <= allowed:
            return f"its {what} off by {off:.2g} of their standard deviation"
    return None


def _probed(states: States, model: Any, head: Callable[[Tensor], Tensor], batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The logits, and the gradient of the first parameter that is trained: through all layers."""
    with torch.enable_grad():
        logits = head(states(model, batch)).float()
        first = next(p for p in model.parameters() if p.requires_grad)
        (gradient,) = torch.autograd.grad(logits.square().mean(), first)
    return logits.detach(), gradient.float()


def _off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.std().clamp_min(1e-12))
