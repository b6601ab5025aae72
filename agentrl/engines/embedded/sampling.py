"""Sampling: from logits to a token, its logprob, and the set of tokens it was drawn among."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.models.kept_tokens import penalize_repetition

LIKELY = 1024  # tokens among which the nucleus is looked for first: to sort a large vocabulary takes long
BLOCK = 256  # tokens whose probabilities are summed first: to sum up a whole vocabulary, one by one, takes long
AT_ONCE = 1 << 21  # logits of so many rows that what is computed of them stays in the CPU's cache


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
    tokens, logprobs = _draw_tokens(scores, uniform, None if temperature is None else (greedy, plain))
    return Sampled(tokens, logprobs, scores > -torch.inf if left_out else None)


def _draw_tokens(scores: Tensor, uniform: Tensor, greedy: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Draw a token of each row, or take its best where it is ``greedy``; tokens and logprobs, (rows,) each."""
    tokens, logprobs = [], []
    size = max(1, AT_ONCE // scores.shape[1])
    for first in range(0, len(scores), size):
        rows = slice(first, first + size)
        probabilities = scores[rows].softmax(-1)
        drawn, total = _invert_distribution(probabilities, uniform[rows, None])
        if greedy is not None:
            drawn = torch.where(greedy[0][rows, None], greedy[1][rows].argmax(-1, keepdim=True), drawn)
        tokens.append(drawn)
        logprobs.append(probabilities.gather(1, drawn).log_().sub_(total.log()).clamp_(max=0.0))
    return torch.cat(tokens)[:, 0], torch.cat(logprobs)[:, 0]


def _invert_distribution(probabilities: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Find the tokens, (rows, 1), at which the distribution functions pass ``uniform``: the block, then the token.

    Return the sums of the probabilities too, (rows, 1): torch's softmax of 262,144 scores in single precision is off
    by 1e-4 there.
    """
    words = probabilities.shape[1]
    whole = words - words % BLOCK
    sums = probabilities[:, :whole].view(len(probabilities), whole // BLOCK, BLOCK).sum(-1)
    if whole < words:
        sums = torch.cat([sums, probabilities[:, whole:].sum(-1, keepdim=True)], dim=1)
    block, inside, total = _find_step(sums, uniform)
    tokens = block * BLOCK + torch.arange(BLOCK, device=block.device)  # (rows, BLOCK)
    chosen = probabilities.gather(1, tokens.clamp(max=words - 1)).masked_fill_(tokens >= words, 0.0)
    return tokens.gather(1, _find_step(chosen, inside)[0]).clamp_(max=words - 1), total  # over it: NaN


def _find_step(masses: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find which of the masses ``uniform`` falls into, where in that one, in [0, 1), and their sum; (rows, 1) each."""
    cdf = masses.cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:]
    below = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))  # a mass of 0 is never met
    step = torch.searchsorted(cdf, below, right=True).clamp_(max=cdf.shape[1] - 1)
    end, mass = cdf.gather(1, step), masses.gather(1, step).double()
    return step, ((below - (end - mass)) / mass).clamp_(0.0, 1.0), total


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
