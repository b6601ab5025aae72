"""The states that predict the trained tokens of a micro-batch: four ways to the same numbers.

``PREFIX`` passes the prefixes that rows share through the model once, and pads nothing. ``PADDED`` runs rows side by
side, padded on the right. ``ALONE`` runs each row by itself, ``EACH_TOKEN`` each token's prefix by itself; the two take
the model's own logits as they are, so nothing is assumed about its head. Which is right for a model is proven
(`agentrl.models.capabilities`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from agentrl.errors import UserError
from agentrl.learner.packing import MicroBatch, PackFunction, pack_by_length, pack_by_prefix
from agentrl.learner.prefix_tree.attention import FOREST_ATTENTION, build_layout
from agentrl.learner.prefix_tree.tree import PrefixForest, build_forest
from agentrl.models.capabilities import Capabilities, NotTestable
from agentrl.models.device_copy import copy_to_device
from agentrl.models.lm_head import (
    NotProven,
    build_lm_head,
    find_backbone,
    replace_attention,
    unwrap_model,
)
from agentrl.models.own_logits import compute_next_logits, compute_own_logits

ComputeStates = Callable[[PreTrainedModel, MicroBatch], Tensor]  # (model, batch) to (trained, width)


def _compute_padded_states(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Run rows side by side. Padding stands behind everything a real token attends to, so no mask is needed."""
    device = next(model.parameters()).device
    ids = pad_sequence([torch.from_numpy(context) for context in batch.contexts], batch_first=True).long()
    ids, trained = copy_to_device(ids, device), torch.from_numpy(batch.trained)
    hidden = find_backbone(unwrap_model(model))(input_ids=ids, use_cache=False).last_hidden_state
    rows, positions = copy_to_device(trained, device).T
    states: Tensor = hidden[rows, positions - 1]  # the state before a token predicts it
    return states


def _compute_forest_states(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Run the prefix forest of the rows. Raises NotProven if the model's attention cannot be replaced."""
    hidden, token_index = _run_forest(unwrap_model(model), batch.forest), batch.forest.token_index
    ends = np.cumsum([len(places) for places in token_index])
    contexts, positions = batch.trained.T
    flat, before = np.concatenate(token_index), (ends - [len(places) for places in token_index])[contexts] + positions
    return hidden.index_select(0, copy_to_device(torch.from_numpy(flat[before - 1]).long(), hidden.device))


def _run_forest(model: PreTrainedModel, forest: PrefixForest) -> Tensor:
    """Run the backbone over a forest; the hidden states, (tokens, width)."""
    layout, backbone = build_layout(forest, next(model.parameters()).device), find_backbone(model)
    with replace_attention(model, FOREST_ATTENTION):
        hidden: Tensor = backbone(
            input_ids=layout.token_ids, position_ids=layout.positions, use_cache=False, forest=layout
        ).last_hidden_state
    return hidden[0]


def _compute_alone(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Run each context by itself; the model's own logits, (trained, vocabulary)."""
    model, logits = unwrap_model(model), []
    contexts, positions = batch.trained.T
    for context in np.unique(contexts).tolist():
        before = torch.from_numpy(positions[contexts == context] - 1)
        logits.append(compute_own_logits(model, batch.contexts[context].tolist())[before])
    return torch.cat(logits)


def _compute_each_token(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Run what stands before each trained token by itself; the model's own logits, (trained, vocabulary)."""
    model = unwrap_model(model)
    prefixes = (batch.contexts[context][:position].tolist() for context, position in batch.trained.tolist())
    return torch.stack([compute_next_logits(model, prefix) for prefix in prefixes])


def _use_logits(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return the head for states that are logits already."""
    return lambda logits: logits


class Packing(NamedTuple):
    """A way to make micro-batches of rows, and to run a model over them."""

    name: str
    pack: PackFunction
    compute_states: ComputeStates
    context: Callable[[PreTrainedModel], AbstractContextManager[None]]  # around forward and backward passes
    build_head: Callable[[PreTrainedModel], Callable[[Tensor], Tensor]]  # from states to logits


PADDED = Packing("padded", pack_by_length, _compute_padded_states, nullcontext, build_lm_head)
PREFIX = PADDED._replace(
    name="prefix",
    pack=pack_by_prefix,
    compute_states=_compute_forest_states,
    context=partial(replace_attention, name=FOREST_ATTENTION),
)
ALONE = PADDED._replace(name="alone", compute_states=_compute_alone, build_head=_use_logits)
EACH_TOKEN = ALONE._replace(name="each token", compute_states=_compute_each_token)
PACKINGS = {packing.name: packing for packing in (PREFIX, PADDED, ALONE, EACH_TOKEN)}


def choose_plain_packing(model: PreTrainedModel) -> tuple[Packing, str]:
    """Choose the way that needs no shared prefixes: the fastest that is proven.

    Returns:
        The way, and why it is not ``PADDED``; an empty text where it is.

    Raises:
        UserError: the model cannot be trained at all; the sentence says why.
    """
    model = unwrap_model(model)
    proofs = Capabilities(model)
    try:
        build_lm_head(model)
        proofs.prove_trainable()
        return PADDED, ""
    except NotTestable:
        return PADDED, ""  # its rows go through the model as they are
    except NotProven as reason:
        why = str(reason)
    try:
        proofs.prove_repeatable()
        if proofs.holds(proofs.prove_causal_alone):
            return ALONE, f"each row goes through it alone: {why}"
        proofs.prove_decoder()
        return EACH_TOKEN, f"each trained token costs a pass over all before it: {why}"
    except NotTestable:
        return ALONE, f"each row goes through it alone: {why}"
    except NotProven as reason:
        raise UserError(f"agentrl cannot train {proofs.name}: {reason} (docs/models.md)") from None


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
    return [hidden[torch.from_numpy(token_index[tuple(row)]).to(hidden.device)] for row in rows]
