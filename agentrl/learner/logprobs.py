"""Logprobs of the trained tokens alone: logits, as wide as the vocabulary, are computed only there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 4096  # trained positions whose logits exist at once


def token_logprobs(
    lm_head: Callable[[Tensor], Tensor],
    states: Tensor,  # (trained, width): each predicts the target beside it
    targets: Tensor,  # (trained,)
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute logprobs and entropies, (trained,) each. Entropies have a gradient only with ``entropy_gradient``."""

    def score(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = lm_head(states).float() / temperature
        logprobs = logits.log_softmax(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, targets[:, None])[:, 0], entropy

    if len(states) <= CHUNK:
        return score(states, targets)
    # Of several chunks, the logits are computed again in the backward pass instead of kept.
    parts = [
        checkpoint(score, s, t, use_reentrant=False)
        for s, t in zip(torch.split(states, CHUNK), torch.split(targets, CHUNK), strict=True)
    ]
    return torch.cat([p for p, _ in parts]), torch.cat([e for _, e in parts])
