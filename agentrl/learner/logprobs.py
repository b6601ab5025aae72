"""Logprobs of the trained tokens alone: logits, as wide as the vocabulary, are computed only there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl.learner.sampling_rules import SamplingRules

CHUNK = 4096  # trained positions whose logits exist at once


def token_logprobs(
    lm_head: Callable[[Tensor], Tensor],
    states: Tensor,  # (trained, width): each predicts the target beside it
    targets: Tensor,  # (trained,)
    temperature: float = 1.0,
    *,
    rules: SamplingRules | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute logprobs and entropies, (trained,) each. Entropies have a gradient only with ``entropy_gradient``.

    Args:
        rules: what else was done to the logits that each target was sampled from. Both numbers are of the distribution
            over the tokens that were kept.
    """

    def score(states: Tensor, targets: Tensor, first: int) -> tuple[Tensor, Tensor]:
        logits, kept = lm_head(states).float(), None
        if rules is not None:
            logits = rules.penalize(logits, first)
        logits = logits / temperature
        if rules is not None and (kept := rules.mark_kept(logits, first)) is not None:
            logits = logits.masked_fill(~kept, -torch.inf)
        logprobs = logits.log_softmax(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            finite = logprobs if kept is None else logprobs.masked_fill(~kept, 0.0)
            entropy = -(logprobs.exp() * finite).sum(-1)
        return logprobs.gather(-1, targets[:, None])[:, 0], entropy

    if len(states) <= CHUNK:
        return score(states, targets, 0)
    # Of several chunks, the logits are computed again in the backward pass instead of kept.
    parts = [
        checkpoint(score, s, t, i * CHUNK, use_reentrant=False)
        for i, (s, t) in enumerate(zip(torch.split(states, CHUNK), torch.split(targets, CHUNK), strict=True))
    ]
    return torch.cat([p for p, _ in parts]), torch.cat([e for _, e in parts])
