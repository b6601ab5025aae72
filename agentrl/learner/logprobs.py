"""Logprobs of the tokens that are trained, and of no others: the vocabulary's width is paid only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 4096  # trained positions whose logits exist at once


def output_head(model: Any) -> Callable[[Tensor], Tensor]:
    """Hidden states to logits, as the model's own forward pass does it, its scaling and soft-capping included.

    Raises:
        NotImplementedError: the model does something else to its logits (found by comparing on a few tokens).
    """
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)

    def logits(hidden: Tensor) -> Tensor:
        out: Tensor = head(hidden) * scale if scale != 1.0 else head(hidden)
        return out if cap is None else cap * torch.tanh(out / cap)

    return logits


def token_logprobs(
    model: Any,
    head: Callable[[Tensor], Tensor],
    token_ids: Tensor,  # (rows, length), padded on the right
    trained: Tensor,  # (rows, length) bool: whose logprob is wanted; never a row's first
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies, (trained tokens,) each, in row order.

    Padding stands on the right, behind everything a real token attends to, so that no mask is needed.
    """
    hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    picked = hidden[:, :-1][trained[:, 1:]]  # the state before a token predicts it
    targets = token_ids[:, 1:][trained[:, 1:]]

    def score(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states).float() / temperature
        logprobs = logits.log_softmax(-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, wanted[:, None])[:, 0], entropy

    if len(picked) <= CHUNK:
        return score(picked, targets)
    # Several chunks: each one's logits are computed again in the backward pass instead of kept.
    parts = [
        checkpoint(score, s, t, use_reentrant=False)
        for s, t in zip(picked.split(CHUNK), targets.split(CHUNK), strict=True)
    ]
    return torch.cat([p for p, _ in parts]), torch.cat([e for _, e in parts])
