"""The hidden states that predict the trained tokens of a micro-batch: two ways to the same numbers.

``PADDED`` is the plain way: rows side by side, padded on the right. ``PREFIX`` passes the prefixes that rows share
through the model once, and pads nothing; for which models it is right is proven (`agentrl.models.capabilities`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from agentrl.errors import UserError
from agentrl.learner.packing import MicroBatch, PackFunction, pack_by_length, pack_by_prefix
from agentrl.learner.prefix_tree.attention import FOREST_ATTENTION, build_layout
from agentrl.learner.prefix_tree.tree import PrefixForest, build_forest
from agentrl.models.capabilities import Capabilities, NotTestable
from agentrl.models.lm_head import NotProven, find_backbone, replace_attention, unwrap_model

ComputeStates = Callable[[PreTrainedModel, MicroBatch], Tensor]  # (model, batch) to (trained, width)


def _compute_padded_states(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Run rows side by side. Padding stands behind everything a real token attends to, so no mask is needed."""
    device = next(model.parameters()).device
    ids = pad_sequence([torch.tensor(row.token_ids) for row in batch.rows], batch_first=True).to(device)
    hidden = find_backbone(unwrap_model(model))(input_ids=ids, use_cache=False).last_hidden_state
    rows, positions = torch.tensor(batch.trained, dtype=torch.int64, device=device).view(-1, 2).T
    states: Tensor = hidden[rows, positions - 1]  # the state before a token predicts it
    return states


def _compute_forest_states(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Run the prefix forest of the rows. Raises NotProven if the model's attention cannot be replaced."""
    hidden, token_index = _run_forest(unwrap_model(model), batch.forest), batch.forest.token_index
    before = [token_index[row][position - 1] for row, position in batch.trained]
    return hidden.index_select(0, torch.tensor(before, dtype=torch.int64, device=hidden.device))


def _run_forest(model: PreTrainedModel, forest: PrefixForest) -> Tensor:
    """Run the backbone over a forest; the hidden states, (tokens, width)."""
    layout, backbone = build_layout(forest, next(model.parameters()).device), find_backbone(model)
    with replace_attention(model, FOREST_ATTENTION):
        hidden: Tensor = backbone(
            input_ids=layout.token_ids, position_ids=layout.positions, use_cache=False, forest=layout
        ).last_hidden_state
    return hidden[0]


class Packing(NamedTuple):
    """A way to make micro-batches of rows, and to run a model over them."""

    pack: PackFunction
    compute_states: ComputeStates
    context: Callable[[PreTrainedModel], AbstractContextManager[None]]  # around forward and backward passes


PADDED = Packing(pack_by_length, _compute_padded_states, nullcontext)
PREFIX = Packing(pack_by_prefix, _compute_forest_states, partial(replace_attention, name=FOREST_ATTENTION))


def check_trainable(model: PreTrainedModel) -> None:
    """Check that rows can be trained side by side.

    Raises:
        UserError: they cannot; the sentence says why.
    """
    model = unwrap_model(model)
    try:
        Capabilities(model).prove_trainable()
    except NotTestable:
        return  # its rows go through the model as they are
    except NotProven as reason:
        raise UserError(
            f"agentrl cannot train {type(model).__name__}: {reason}; docs/models.md lists the models that can"
        ) from None


def prove_prefix_sharing(model: PreTrainedModel) -> None:
    """Show that a model's rows may share their prefixes: states, and a gradient through them, are its own.

    Raises:
        NotProven: the reason.
    """
    capabilities = Capabilities(unwrap_model(model))
    capabilities.prove_kind(_run_rows_as_forest, gradient=True)
    capabilities.prove_itself(_run_rows_as_forest, gradient=True)


def _run_rows_as_forest(model: PreTrainedModel, rows: list[list[int]]) -> list[Tensor]:
    forest = build_forest(sorted(rows))
    hidden = _run_forest(model, forest)
    token_index = {tuple(row): index for row, index in zip(sorted(rows), forest.token_index, strict=True)}
    return [hidden[token_index[tuple(row)]] for row in rows]
