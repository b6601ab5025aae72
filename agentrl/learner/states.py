"""The hidden states that predict the trained tokens of a micro-batch: two ways to the same numbers.

``padded_states`` is the plain way: rows side by side, padded on the right. ``forest_states`` passes what rows share
through the model once, and pads nothing; which models it is right for is proven (`agentrl.models.capabilities`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl.errors import UserError
from agentrl.learner.attention import attending, layout
from agentrl.learner.forest import Forest, grow
from agentrl.learner.logprobs import causal_lm
from agentrl.learner.packing import MicroBatch, Pack, by_length, by_prefix
from agentrl.models.capabilities import Capabilities, NotProven, Untried, inner_model

States = Callable[[Any, MicroBatch], Tensor]  # (model, batch) to (trained, width)


def padded_states(model: Any, batch: MicroBatch) -> Tensor:
    """Padding stands on the right, behind everything a real token attends to, so that no mask is needed."""
    device = next(model.parameters()).device
    ids = pad_sequence([torch.tensor(row.token_ids) for row in batch.rows], batch_first=True).to(device)
    hidden = inner_model(causal_lm(model))(input_ids=ids, use_cache=False).last_hidden_state
    rows, positions = torch.tensor(batch.trained, dtype=torch.int64, device=device).view(-1, 2).T
    picked: Tensor = hidden[rows, positions - 1]  # the state before a token predicts it
    return picked


def forest_states(model: Any, batch: MicroBatch) -> Tensor:
    """Raises NotImplementedError for a model whose attention cannot be replaced."""
    hidden, places = _hidden(causal_lm(model), batch.forest), batch.forest.places
    before = [places[row][position - 1] for row, position in batch.trained]
    return hidden.index_select(0, torch.tensor(before, dtype=torch.int64, device=hidden.device))


def _hidden(model: Any, forest: Forest) -> Tensor:
    """(tokens, width)"""
    laid, inner = layout(forest, next(model.parameters()).device), inner_model(model)
    given = {"input_ids": laid.token_ids, "position_ids": laid.positions, "use_cache": False}
    with attending(model):
        hidden: Tensor = inner(**given, forest=laid).last_hidden_state
    return hidden[0]


class Packing(NamedTuple):
    """How rows become micro-batches, and how those go through the model."""

    pack: Pack
    states: States
    held: Callable[[Any], AbstractContextManager[None]]  # of the model, around forward and backward passes


PADDED = Packing(by_length, padded_states, nullcontext)
PREFIX = Packing(by_prefix, forest_states, attending)


def check_trainable(model: Any) -> None:
    """Raises UserError: the model's rows cannot be trained side by side; the sentence says why."""
    model = causal_lm(model)
    try:
        Capabilities(model).refuse_untrainable()
    except Untried:
        return  # its rows go through the model as they are
    except NotProven as why:
        raise UserError(
            f"agentrl cannot train {type(model).__name__}: {why}; docs/models.md lists the models that can"
        ) from None


def refuse_sharing(model: Any) -> None:
    """Show that a model's rows may share their prefixes: its states, and a gradient through them, are the plain way's.

    Raises:
        NotProven: why not.
    """
    known = Capabilities(causal_lm(model))
    known.refuse_kind(_over_a_forest, gradient=True)
    known.refuse_itself(_over_a_forest, gradient=True)


def _over_a_forest(model: Any, rows: list[list[int]]) -> list[Tensor]:
    forest = grow(sorted(rows))
    hidden, places = _hidden(model, forest), {tuple(r): p for r, p in zip(sorted(rows), forest.places, strict=True)}
    return [hidden[places[tuple(row)]] for row in rows]
