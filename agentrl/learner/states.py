"""The hidden states that predict the trained tokens of a micro-batch: two ways to the same numbers.

``padded_states`` is the plain way: rows side by side, padded on the right. ``forest_states`` passes what rows share
through the model once, and pads nothing; which models it is right for is found by comparing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl.learner.attention import Layout, following
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
    forest, device = batch.forest, next(model.parameters()).device
    layout = Layout(forest, device)
    with following(causal_lm(model), layout):
        hidden = (
            causal_lm(model)
            .base_model(input_ids=layout.token_ids, position_ids=layout.positions, use_cache=False)
            .last_hidden_state
        )
    before = [forest.places[row][position - 1] for row, position in batch.trained]
    picked: Tensor = hidden[0].index_select(0, torch.tensor(before, dtype=torch.int64, device=device))
    return picked


class Packing(NamedTuple):
    """How rows become micro-batches, and how those go through the model."""

    pack: Pack
    states: States


PADDED = Packing(by_length, padded_states)
PREFIX = Packing(by_prefix, forest_states)


@torch.no_grad()
def difference(model: Any, head: Callable[[Tensor], Tensor], batch: MicroBatch) -> str | None:
    """Why the forest's states of a batch are not the padded ones; None where they are."""
    training = model.training
    model.eval()  # dropout would differ
    try:
        found = head(forest_states(model, batch)).float()
        wanted = head(padded_states(model, batch)).float()
    except NotImplementedError as error:
        return str(error)
    finally:
        model.train(training)
    off = float((found - wanted).square().mean().sqrt() / wanted.std())
    allowed = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1
    return None if off <= allowed else f"its logits are off by {off:.2g} of their standard deviation"
