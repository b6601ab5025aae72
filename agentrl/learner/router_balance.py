"""The balancing loss of a mixture of experts (Switch Transformer, arXiv 2101.03961), added to the policy's.

It is computed as transformers does, for each micro-batch over all of its tokens, prompts included, and all its layers
together. A step's is the mean over its micro-batches by their tokens, so that one micro-batch gives TRL's number. A
token that several rows share counts once for each of them, however it was packed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from agentrl.errors import UserError
from agentrl.learner.packing import MicroBatch
from agentrl.models.device_copy import copy_to_device
from agentrl.models.lm_head import NotProven, find_backbone, unwrap_model
from agentrl.models.routers import EXPERTS, TOP_K_NAMES


@dataclass(frozen=True)
class RouterBalance:
    """The balancing loss of a model: its coefficient, and what it is computed by."""

    coef: float
    experts: int
    chosen: int  # experts of a token
    loss: Callable[..., Tensor]  # transformers' load_balancing_loss_func

    @contextmanager
    def record(self, model: PreTrainedModel) -> Iterator[list[Tensor]]:
        """Collect the routers' logits of the passes in this block, (tokens, experts) a layer."""
        backbone, logits = find_backbone(unwrap_model(model)), list[Tensor]()
        hooks = [
            backbone.register_forward_pre_hook(
                lambda module, args, kwargs: (args, {**kwargs, "output_router_logits": True}), with_kwargs=True
            ),
            backbone.register_forward_hook(
                lambda module, args, output: logits.extend(getattr(output, "router_logits", None) or ())
            ),
        ]
        try:
            yield logits
        finally:
            for hook in hooks:
                hook.remove()

    def compute(self, logits: list[Tensor], batch: MicroBatch, *, shares_prefixes: bool) -> Tensor:
        """Compute the loss of a micro-batch, without its coefficient, from the routers' logits."""
        counts = copy_to_device(count_rows(batch, shares_prefixes=shares_prefixes), logits[0].device)
        flat = tuple(layer.reshape(-1, layer.shape[-1]) for layer in logits)
        counts = pad(counts, (0, len(flat[0]) - len(counts)))  # a forest may be padded to whole blocks
        return self.loss(flat, self.experts, self.chosen, counts)


def find_router_balance(model: PreTrainedModel, coef: float | None) -> RouterBalance | None:
    """Find the balancing loss of a model; None if it has none, or a coefficient of 0.

    Args:
        coef: by default the one that the model's config declares.

    Raises:
        UserError: a coefficient is given, and the model has no such loss.
    """
    plain = unwrap_model(model)
    config = plain.config.get_text_config()
    own = getattr(config, "router_aux_loss_coef", None) or 0.0
    balance = RouterBalance(
        own if coef is None else coef,
        _read_number(plain, config, EXPERTS),
        _read_number(plain, config, TOP_K_NAMES),
        _find_loss(plain),
    )
    if balance.coef == 0.0:
        return None
    if hasattr(config, "output_router_logits") and balance.experts and balance.chosen and _gives_logits(plain, balance):
        return balance
    if coef is None:
        return None
    raise UserError(
        f"learner.router_aux_loss_coef {coef:g}: {type(plain).__name__} is no mixture of experts whose routers' logits "
        "transformers gives"
    )


def count_rows(batch: MicroBatch, *, shares_prefixes: bool) -> Tensor:
    """Count the rows that each position of a micro-batch's pass is of: 0 for padding. (positions,), float32."""
    if shares_prefixes:
        positions = torch.from_numpy(np.concatenate(batch.forest.token_index))
        return torch.bincount(positions, minlength=len(batch.forest.token_ids)).float()
    lengths = torch.tensor([len(context) for context in batch.contexts])
    return (torch.arange(int(lengths.max()))[None] < lengths[:, None]).float().reshape(-1)


def _read_number(model: PreTrainedModel, config: Any, names: tuple[str, ...]) -> int:
    values = (getattr(part, name, None) for part in (model, config) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _find_loss(model: PreTrainedModel) -> Callable[..., Tensor]:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    own: Callable[..., Tensor] = getattr(
        sys.modules[type(model).__module__], "load_balancing_loss_func", load_balancing_loss_func
    )
    return own


@torch.no_grad()
def _gives_logits(model: PreTrainedModel, balance: RouterBalance) -> bool:
    """Return True if a pass over a few tokens gives logits, of as many experts as there are."""
    ids = torch.arange(4, device=next(model.parameters()).device)[None] % model.config.get_text_config().vocab_size
    try:
        with balance.record(model) as logits:
            find_backbone(model)(input_ids=ids, use_cache=False)
    except (NotProven, TypeError):  # a backbone that does not know the word
        return False
    return bool(logits) and all(layer.shape[-1] == balance.experts for layer in logits)
