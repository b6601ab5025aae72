"""Sampling: from logits to a token, its logprob, and the set of tokens it was drawn among."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.models.kept_tokens import penalize_repetition

LIKELY = 1024  # tokens among which the nucleus is looked for first: to sort a large vocabulary takes long


class Sampled(NamedTuple):
    """Tokens with their logprobs, (rows,), and the sets they were drawn among, (rows, vocabulary).

    ``kept`` is None where nothing was left out.
    """

    tokens: Tensor
    logprobs: Tensor
    kept: Tensor | None = None


def sample_tokens(
    logits: Tensor,  # (rows, vocabulary)
    uniform: Tensor,  # (rows,) in [0, 1), double: each row's randomness
    temperature: Tensor | None = None,  # (rows,); 0 is greedy; None: 1 for all
    *,
    allowed: Tensor | None = None,  # (rows, vocabulary): what a grammar allows
    seen: Tensor | None = None,  # (rows, vocabulary): the tokens of each row's context
    repetition_penalty: Tensor | None = None,  # (rows,), with ``seen``
    top_k: Tensor | None = None,  # (rows,); 0 keeps all
    top_p: Tensor | None = None,  # (rows,)
    min_p: Tensor | None = None,  # (rows,)
) -> Sampled:
    """Sample token ids by inversion of the distribution function.

    Logits are processed in the order of transformers: ``seen``, ``allowed``, temperature, ``top_k``, ``top_p``,
    ``min_p``. The logprob is of the distribution that was sampled from: over the tokens that are kept. A greedy row
    takes the best of the allowed tokens, and reports its logprob among those, at temperature 1.
    """
    scores = logits.float()
    if seen is not None and repetition_penalty is not None:
        scores = penalize_repetition(scores, seen, repetition_penalty[:, None])
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    plain = scores
    if temperature is not None:
        greedy = temperature == 0
        scores = scores / torch.where(greedy, 1.0, temperature)[:, None]
    left_out = allowed is not None or not (top_k is top_p is min_p is None)
    if left_out:
        truncated = _truncate(scores, top_k, top_p, min_p)
        scores = truncated if temperature is None else torch.where(greedy[:, None], scores, truncated)
    logprobs = scores.log_softmax(-1)
    cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1]
    below = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))  # a token of probability 0 is none
    tokens = torch.searchsorted(cdf, below[:, None], right=True).clamp_(max=cdf.shape[1] - 1)  # (rows, 1); over it: NaN
    if temperature is not None:
        tokens = torch.where(greedy[:, None], plain.argmax(-1, keepdim=True), tokens)
    return Sampled(tokens[:, 0], logprobs.gather(1, tokens)[:, 0], scores > -torch.inf if left_out else None)


def _truncate(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Set the scores of the tokens that are left out to minus infinity."""
    if top_k is not None:
        k = torch.where(top_k > 0, top_k, scores.shape[1]).clamp(max=scores.shape[1])
        ordered = scores.topk(int(k.max()), dim=-1).values
        scores = scores.masked_fill(scores < ordered.gather(1, k[:, None] - 1), -torch.inf)
    if top_p is not None:
        scores = scores.masked_fill(~_find_nucleus(scores, top_p), -torch.inf)
    if min_p is not None:
        probabilities = scores.softmax(-1)
        scores = scores.masked_fill(probabilities < min_p[:, None] * probabilities.amax(-1, keepdim=True), -torch.inf)
    return scores


def _find_nucleus(scores: Tensor, top_p: Tensor) -> Tensor:
    """Mark the smallest set whose probability reaches p, (rows, vocabulary)."""
    probabilities, p = scores.softmax(-1), top_p[:, None]
    for size in (LIKELY, scores.shape[1]):
        ordered, order = probabilities.topk(min(size, scores.shape[1]), dim=-1)
        before = ordered.cumsum(-1) - ordered
        if bool((before[:, -1:] >= p).logical_or_(p >= 1.0).all()):
            break
    inside = before < p
    inside[:, 0] = True
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, inside).logical_or_(p >= 1.0)
