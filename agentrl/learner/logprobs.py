"""Logprobs of the trained tokens alone, and their entropies: logits, as wide as the vocabulary, are counted in bytes.

Logits exist once. Where all of a micro-batch fit the budget they stay, and turn into their own gradient in the backward
pass, in place; where they do not, so many positions at a time are computed, and computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from agentrl.learner.sampling_rules import SamplingRules
from agentrl.models.lm_head import LmHead

LOGITS_BYTES = 512 << 20  # of the logits that exist at once
BLOCK_BYTES = 2 << 20  # of the logits that are worked on at once: what a core's cache holds
CUDA_BLOCK_BYTES = 64 << 20  # a kernel of a GPU wants many at once
LEFT_OUT = -1e30  # the logit of a token that was not kept: finite, so that 0 times it is 0


def token_logprobs(
    lm_head: Callable[[Tensor], Tensor],
    states: Tensor,  # (trained, width): each predicts the target beside it
    targets: Tensor,  # (trained,)
    temperature: float = 1.0,
    *,
    rules: SamplingRules | None = None,
    entropy_gradient: bool = False,
    gradient_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute logprobs and entropies, (trained,) each. Entropies have a gradient only with ``entropy_gradient``.

    Args:
        rules: what else was done to the logits that each target was sampled from. Both numbers are of the distribution
            over the tokens that were kept.
        gradient_dtype: that a linear output layer multiplies in for its gradients; by default that of its logits.
    """
    keeps = torch.is_grad_enabled()
    if isinstance(lm_head, LmHead) and (layer := lm_head.linear) is not None:
        distribution = _Distribution(targets, temperature, rules, lm_head.scale, lm_head.cap)
        dtype = lm_head.product_dtype(states)
        dtypes = dtype, gradient_dtype or dtype
        given = (states, layer.weight, layer.bias, distribution, *dtypes, entropy_gradient, keeps)
        logprobs, entropy = _LinearLogprobs.apply(*given)  # type: ignore[no-untyped-call]
        return logprobs, entropy
    return _score_any_head(lm_head, states, _Distribution(targets, temperature, rules), entropy_gradient)


def _score_any_head(
    lm_head: Callable[[Tensor], Tensor], states: Tensor, distribution: _Distribution, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Score by a head of which nothing is known but that it is called: autograd computes its gradients."""

    def score(states: Tensor, first: int) -> tuple[Tensor, Tensor]:
        logits = lm_head(states)
        return _Logprobs.apply(logits, distribution, first, entropy_gradient)  # type: ignore[no-untyped-call, no-any-return]

    with torch.no_grad():
        width = lm_head(states[:1]).shape[-1]
    count = max(LOGITS_BYTES // (3 * 4 * width), 1)  # the head's own, a copy of them, a gradient
    if len(states) <= count:
        return score(states, 0)
    parts = [
        checkpoint(score, part, i * count, use_reentrant=False) for i, part in enumerate(torch.split(states, count))
    ]
    return torch.cat([p for p, _ in parts]), torch.cat([e for _, e in parts])


@dataclass(frozen=True)
class _Scores:
    """Logprobs and entropies, and what the backward pass needs beside the logits; (trained,) each."""

    logprobs: Tensor
    entropy: Tensor
    largest: Tensor  # logit, which was subtracted
    log_sums: Tensor  # of the exponentials of what was left

    @classmethod
    def cat(cls, parts: Sequence[_Scores]) -> _Scores:
        """Concatenate those of chunks."""
        return cls(*(torch.cat(columns) for columns in zip(*(vars(p).values() for p in parts), strict=True)))

    def at(self, rows: slice) -> _Scores:
        """Select those of some rows."""
        return _Scores(*(column[rows] for column in vars(self).values()))


@dataclass(frozen=True)
class _Distribution:
    """The distribution that targets are scored in: a function of what an output layer computes."""

    targets: Tensor
    temperature: float
    rules: SamplingRules | None = None
    scale: float = 1.0
    cap: float | None = None

    def score_(self, logits: Tensor, first: int) -> _Scores:
        """Score the targets from ``first`` on by the output layer's logits, which are overwritten, block by block."""
        return _Scores.cat([self._score_block_(block, first + at) for at, block in _split(logits)])

    def _score_block_(self, z: Tensor, first: int) -> _Scores:
        if self.scale != 1.0:
            z.mul_(self.scale)
        if self.cap is not None:
            z.div_(self.cap).tanh_().mul_(self.cap)
        if self.rules is not None and (factors := self.rules.find_penalties(z, first)) is not None:
            z.mul_(factors)
        if self.temperature != 1.0:
            z.div_(self.temperature)
        if self.rules is not None and (kept := self.rules.mark_kept(z, first)) is not None:
            z.masked_fill_(~kept, LEFT_OUT)
        largest = z.amax(-1)
        exponentials = z.sub_(largest[:, None]).exp()
        sums = exponentials.sum(-1)
        log_sums = sums.log()
        entropy = log_sums - exponentials.mul_(z).sum(-1) / sums
        targets = self.targets[first : first + len(z), None]
        return _Scores(z.gather(-1, targets)[:, 0] - log_sums, entropy, largest, log_sums)

    def differentiate_(
        self, logits: Tensor, first: int, scores: _Scores, logprob_grad: Tensor, entropy_grad: Tensor | None
    ) -> None:
        """Turn what ``score_`` left of the logits into the gradient of what the output layer computed, in place."""
        for at, block in _split(logits):
            rows = slice(at, at + len(block))
            entropy = None if entropy_grad is None else entropy_grad[rows]
            self._differentiate_block_(block, first + at, scores.at(rows), logprob_grad[rows], entropy)

    def _differentiate_block_(
        self, z: Tensor, first: int, scores: _Scores, logprob_grad: Tensor, entropy_grad: Tensor | None
    ) -> None:
        chain = self._differentiate_logits(z, first, scores)
        z.sub_(scores.log_sums[:, None])
        if entropy_grad is None:
            z.exp_().mul_(-logprob_grad[:, None])
        else:  # d entropy / d logit is -p (log p + entropy)
            weights = torch.addcmul(logprob_grad[:, None], entropy_grad[:, None], z + scores.entropy[:, None])
            z.exp_().mul_(weights.neg_())
        z.scatter_add_(-1, self.targets[first : first + len(z), None], logprob_grad[:, None])
        if (factor := self.scale / self.temperature) != 1.0:
            z.mul_(factor)
        if chain is not None:
            z.mul_(chain)

    def _differentiate_logits(self, z: Tensor, first: int, scores: _Scores) -> Tensor | None:
        """Return d logit / d output for what is no constant: the penalties, and the slope of the cap."""
        penalizes = self.rules is not None and self.rules.repetition_penalty != 1.0
        if self.cap is None and not penalizes:
            return None
        before = (z + scores.largest[:, None]).mul_(self.temperature)  # of their own sign
        factors = None if self.rules is None else self.rules.find_penalties(before, first)
        if self.cap is None:
            return factors
        slope = (before if factors is None else before.div_(factors)).div_(self.cap).square_().neg_().add_(1.0)
        slope.clamp_(min=0.0)  # of tokens that were not kept it is no number of theirs, and their gradient is 0
        return slope if factors is None else slope.mul_(factors)


def _split(logits: Tensor) -> list[tuple[int, Tensor]]:
    """Split logits into blocks of rows, each with the number of its first."""
    size = BLOCK_BYTES if logits.device.type == "cpu" else CUDA_BLOCK_BYTES
    rows = max(size // (4 * logits.shape[-1]), 1)
    return [(at, logits[at : at + rows]) for at in range(0, max(len(logits), 1), rows)]


class _Logprobs(torch.autograd.Function):
    """Logprobs and entropies of logits that someone else computed."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, distribution: _Distribution, first: int, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        kept = logits.to(torch.float32, copy=True)
        scores = distribution.score_(kept, first)
        ctx.dtype, ctx.kept, ctx.scores = logits.dtype, kept, scores
        ctx.distribution, ctx.first, ctx.entropy_gradient = distribution, first, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(scores.entropy)
        return scores.logprobs, scores.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = ctx.kept.clone()  # whoever asks twice gets the same
        wanted = entropy_grad if ctx.entropy_gradient else None
        ctx.distribution.differentiate_(grad, ctx.first, ctx.scores, logprob_grad, wanted)
        return grad.to(ctx.dtype), None, None, None


class _LinearLogprobs(torch.autograd.Function):
    """Logprobs and entropies behind a linear output layer."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        distribution: _Distribution,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        entropy_gradient: bool,
        keeps: bool,
    ) -> tuple[Tensor, Tensor]:
        head = _LinearHead(states, weight, bias, dtype, gradient_dtype)
        count = head.count_affordable()
        parts, logits = [], None
        for first in range(0, max(len(states), 1), count):
            del logits  # before the next ones are there
            logits = head.compute_logits(slice(first, first + count))
            parts.append(distribution.score_(logits, first))
        ctx.save_for_backward(states, weight, bias)
        ctx.kept = logits if keeps and len(parts) == 1 else None
        ctx.scores, ctx.distribution, ctx.dtype = _Scores.cat(parts), distribution, dtype
        ctx.gradient_dtype, ctx.entropy_gradient = gradient_dtype, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(ctx.scores.entropy)
        return ctx.scores.logprobs, ctx.scores.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias = ctx.saved_tensors
        head = _LinearHead(states, weight, bias, ctx.dtype, ctx.gradient_dtype)
        grads = _HeadGradients(head, ctx.needs_input_grad)
        count = head.count_affordable()
        for first in range(0, len(states), count):
            rows = slice(first, first + count)
            logits, ctx.kept = ctx.kept, None  # it becomes the gradient: whoever asks again has it computed again
            scores = ctx.scores.at(rows)
            if logits is None:
                logits = head.compute_logits(rows)
                ctx.distribution.score_(logits, first)
            wanted = entropy_grad[rows] if ctx.entropy_gradient else None
            ctx.distribution.differentiate_(logits, first, scores, logprob_grad[rows], wanted)
            grads.add(rows, logits)
            del logits
        return grads.states, grads.weight, grads.bias, None, None, None, None, None


@dataclass(frozen=True)
class _LinearHead:
    """A linear output layer, its inputs, and the precision of its products."""

    states: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    gradient_dtype: torch.dtype

    def count_affordable(self) -> int:
        """Count the positions whose logits fit the budget; those of another precision exist twice for a moment."""
        itemsize = 4 + max(0 if d == torch.float32 else d.itemsize for d in (self.dtype, self.gradient_dtype))
        return max(LOGITS_BYTES // (itemsize * len(self.weight)), 1)

    def compute_logits(self, rows: slice) -> Tensor:
        """Compute logits in single precision, in memory of their own."""
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return linear(self.states[rows].to(self.dtype), self.weight.to(self.dtype), bias).float()


class _HeadGradients:
    """The gradients of a linear output layer, summed over chunks; None for what is not wanted."""

    def __init__(self, head: _LinearHead, wanted: Sequence[bool]) -> None:
        self._head = head
        self.states = torch.empty_like(head.states) if wanted[0] else None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self._wants_weight, self._wants_bias = wanted[1], wanted[2]

    def add(self, rows: slice, logits_grad: Tensor) -> None:
        """Add those of some positions."""
        head, dtype = self._head, self._head.gradient_dtype
        grad = logits_grad.to(dtype)
        if self.states is not None:
            self.states[rows] = (grad @ head.weight.to(dtype)).to(self.states.dtype)
        if self._wants_weight:
            states = head.states[rows].to(dtype)
            if self.weight is None:
                self.weight = (grad.T @ states).to(head.weight.dtype)
            elif self.weight.dtype == dtype:
                self.weight.addmm_(grad.T, states)
            else:
                self.weight += grad.T @ states
        if self._wants_bias and head.bias is not None:
            own = logits_grad.sum(0).to(head.bias.dtype)
            self.bias = own if self.bias is None else self.bias.add_(own)
