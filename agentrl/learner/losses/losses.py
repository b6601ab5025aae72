"""The losses of a trained token, before importance sampling and reduction: pure functions, one entry a token.

Each is an entry of ``LOSSES``. ``w`` is the log ratio of `ratio`, by token or by row; ``rho`` the importance sampling
ratio of `correction`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from agentrl.learner.losses.ratio import row_mean, row_sum


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of a micro-batch, (tokens,) each; ``rows`` is the index of each one's row, of ``count``."""

    logp: Tensor  # of the policy now: the only one with a gradient
    old: Tensor  # of the policy before the step's first update
    sampled: Tensor  # the engine's
    advantages: Tensor
    rows: Tensor  # int64
    count: int
    entropy: Tensor
    ref: Tensor | None = None  # of the reference model


@dataclass(frozen=True)
class Clip:
    """Bounds of the ratio. ``delta`` bounds what a negative advantage may push (two-sided clipping, INTELLECT-2)."""

    low: float = 0.2
    high: float = 0.28
    delta: float | None = None


def _ppo_clip(t: Tokens, w: Tensor, rho: Tensor, clip: Clip) -> Tensor:
    """Compute PPO's pessimistic clipped objective, negated; ``high > low`` is DAPO's clip-higher (arXiv 2503.14476)."""
    ratio = _bound_ratio(w.exp(), clip)
    return -torch.minimum(ratio * t.advantages, w.exp().clamp(1 - clip.low, 1 + clip.high) * t.advantages)


def _cispo(t: Tokens, w: Tensor, rho: Tensor, clip: Clip) -> Tensor:
    """Weigh REINFORCE by a capped ratio: no token loses its gradient (MiniMax-M1, arXiv 2506.13585)."""
    return -w.exp().clamp(max=clip.high).detach() * t.advantages * t.logp


def _sapo(t: Tokens, w: Tensor, rho: Tensor, clip: Clip) -> Tensor:
    """Gate softly instead of clipping, more sharply where the advantage is negative (SAPO, arXiv 2511.20347)."""
    tau = torch.where(t.advantages > 0, 1.0, 1.05).to(w.dtype)
    return -t.advantages * torch.sigmoid(tau * (w.exp() - 1)) * 4 / tau


def _vespo(t: Tokens, w: Tensor, rho: Tensor, clip: Clip) -> Tensor:
    """Weigh REINFORCE by a gamma-shaped function of the row's whole ratio, which contains ``rho``."""
    return -vespo_weight(t, rho) * t.advantages * t.logp


def vespo_weight(t: Tokens, rho: Tensor) -> Tensor:
    """Compute exp(lam + k s - lam e^s), without a gradient.

    s is the row's log ratio to the engine; (k, lam) depend on the advantage's sign.
    """
    floor = log(1e-8)
    with torch.no_grad():
        moved = (t.logp - t.old).clamp(-20.0, 20.0)
        s = row_sum(moved + rho.log().clamp(floor, 20.0), t.rows, t.count)[t.rows].clamp(floor, 20.0)
        k, lam = (torch.where(t.advantages >= 0, a, b) for a, b in ((2.0, 3.0), (3.0, 2.0)))
        return torch.exp(lam + k * s - lam * s.exp()).nan_to_num(0.0, 0.0, 0.0)


def _bound_ratio(ratio: Tensor, clip: Clip) -> Tensor:
    return ratio if clip.delta is None else ratio.clamp(max=clip.delta)


def clip_masks(t: Tokens, w: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """Mark the tokens whose gradient the clip takes away, below and above: 1.0, others 0.0."""
    ratio = _bound_ratio(w.detach().exp(), clip)
    low = (ratio < 1 - clip.low) & (t.advantages < 0)
    high = (ratio > 1 + clip.high) & (t.advantages > 0)
    return low.to(w.dtype), high.to(w.dtype)


def k3_kl(t: Tokens) -> Tensor:
    """Estimate KL(policy || reference) by k3, which is never negative (Schulman 2020)."""
    assert t.ref is not None
    d = t.ref - t.logp
    return d.exp() - d - 1


def off_policy_mask(t: Tokens, threshold: float) -> Tensor:
    """Mark the tokens to train, 1.0: not those of a row with a negative advantage that the policy has left, 0.0.

    The policy has left a row where mean(sampled - logp) is over the threshold.
    """
    left = row_mean(t.sampled - t.logp.detach(), t.rows, t.count)[t.rows] > threshold
    return (~(left & (t.advantages < 0))).to(t.logp.dtype)


def high_entropy_mask(entropy: Tensor, share: float) -> Tensor:
    """Mark the ``share`` of tokens with the highest entropy, 1.0, others 0.0 (arXiv 2506.01939)."""
    if not len(entropy):
        return entropy
    return (entropy >= entropy_threshold(entropy, share)).to(entropy.dtype)


def entropy_threshold(entropy: Tensor, share: float) -> Tensor:
    """Find the lowest entropy among the ``share`` of tokens with the highest."""
    return torch.quantile(entropy.float(), 1 - share)


Loss = Callable[[Tokens, Tensor, Tensor, Clip], Tensor]
LOSSES: dict[str, Loss] = {
    "dapo": _ppo_clip,
    "grpo": _ppo_clip,
    "bnpo": _ppo_clip,
    "dr_grpo": _ppo_clip,
    "luspo": _ppo_clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
}
CLIPPED = frozenset(name for name, loss in LOSSES.items() if loss is _ppo_clip)
