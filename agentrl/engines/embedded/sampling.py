"""Sampling: from logits to a token and its logprob."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_tokens(
    logits: Tensor,  # (rows, vocabulary)
    uniform: Tensor,  # (rows,) in [0, 1), double: each row's randomness
    temperature: Tensor | None = None,  # (rows,); 0 is greedy; None: 1 for all
    top_p: Tensor | None = None,  # (rows,)
    top_k: Tensor | None = None,  # (rows,); 0 keeps all
) -> tuple[Tensor, Tensor]:
    """Sample token ids by inversion of the distribution function; return them and their logprobs, (rows,) each.

    The logprob is of the distribution that was sampled from: at the row's temperature, over the tokens that ``top_k``
    and ``top_p`` keep. A greedy row reports the plain distribution's, at temperature 1.
    """
    scaled = logits.float()
    if temperature is not None:
        greedy = temperature == 0
        scaled = scaled / torch.where(greedy, 1.0, temperature)[:, None]
    if top_p is not None and top_k is not None:
        scaled = _truncate(scaled, top_p, top_k)
    logprobs = scaled.log_softmax(-1)
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
    sampled = torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True)  # (rows, 1)
    tokens = sampled.clamp_(max=cdf.shape[-1] - 1)
    if temperature is not None:
        tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def _truncate(logits: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Set logits to minus infinity outside the top k, and outside the smallest set whose probability reaches p."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)  # stable: argmax stays first among equals
    rank = torch.arange(logits.shape[-1], device=logits.device)
    k = torch.where(top_k > 0, top_k, logits.shape[-1])
    ordered = ordered.masked_fill(rank >= k[:, None], -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    ordered = ordered.masked_fill((before >= top_p[:, None]) & (rank > 0), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)
