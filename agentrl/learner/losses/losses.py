"""The losses of a trained token, before corrections and reductions: pure functions of tensors with one entry a token.

Each is a sibling in ``LOSSES``. ``w`` is the log ratio of ``learner.ratio``, by token or by row; ``A`` the advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from agentrl.learner.ratio import row_mean, row_sum


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of a micro-batch, (tokens,) each; ``rows`` says in which of ``count`` rows each one stands."""

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
    """Where ratios end. ``delta`` bounds what a negative advantage may push (two-sided clipping, INTELLECT-2)."""

    low: float = 0.2
    high: float = 0.28
    delta: float | None = None


def clipped(t: Tokens, w: Tensor, rho: Tensor, clip: Clip) -> Tensor:
    """PPO's pessimistic clipped objective, negated; ``high > low`` is DAPO's clip-higher (arXiv 2503.14476)."""
    ratio = _bounded(w.exp(), clip)
    return -torch.minimum(ratio * t.advantages, w.exp().clamp(1 - clip.low, 1 + clip.high) * t.advantages)


def cispo(t: Tokens, w: Tensor, rho: Tensor, clip: Clip) -> Tensor:
    """REINFORCE with a capped ratio as its weight: no token loses its gradient (MiniMax-M1, arXiv 2506.13585)."""
    return -w.exp().clamp(max=clip.high).detach() * t.advantages * t.logp


def sapo(t: Tokens, w: Tensor, rho: Tensor, clip: Clip) -> Tensor:
    """A soft gate instead of a clip, sharper where the advantage is negative (SAPO, arXiv 2511.20347)."""
    tau = torch.where(t.advantages > 0, 1.0, 1.05).to(w.dtype)
    return -t.advantages * torch.sigmoid(tau * (w.exp() - 1)) * 4 / tau


def vespo(t: Tokens, w: Tensor, rho: Tensor, clip: Clip) -> Tensor:
    """REINFORCE with a gamma-shaped weight of the row's whole ratio, the correction ``rho`` inside."""
    return -gamma_weight(t, rho) * t.advantages * t.logp


def gamma_weight(t: Tokens, rho: Tensor) -> Tensor:
    """exp(lam + k s - lam e^s), s the row's log ratio to the engine; (k, lam) by the advantage's sign. No gradient."""
    least = log(1e-8)
    with torch.no_grad():
        moved = (t.logp - t.old).clamp(-20.0, 20.0)
        s = row_sum(moved + rho.log().clamp(least, 20.0), t.rows, t.count)[t.rows].clamp(least, 20.0)
        k, lam = (torch.where(t.advantages >= 0, a, b) for a, b in ((2.0, 3.0), (3.0, 2.0)))
        return torch.exp(lam + k * s - lam * s.exp()).nan_to_num(0.0, 0.0, 0.0)


def _bounded(ratio: Tensor, clip: Clip) -> Tensor:
    return ratio if clip.delta is None else ratio.clamp(max=clip.delta)


def out_of_range(t: Tokens, w: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """1.0 where the clip takes the gradient away, below and above; 0.0 elsewhere."""
    ratio = _bounded(w.detach().exp(), clip)
    low = (ratio < 1 - clip.low) & (t.advantages < 0)
    high = (ratio > 1 + clip.high) & (t.advantages > 0)
    return low.to(w.dtype), high.to(w.dtype)


def k3(t: Tokens) -> Tensor:
    """An estimate of KL(policy || reference) that is never negative (Schulman 2020)."""
    assert t.ref is not None
    d = t.ref - t.logp
    return d.exp() - d - 1


def on_policy_rows(t: Tokens, threshold: float) -> Tensor:
    """0.0 for tokens of rows to be punished that the policy has left: mean(sampled - logp) over the threshold."""
    behind = row_mean(t.sampled - t.logp.detach(), t.rows, t.count)[t.rows] > threshold
    return (~(behind & (t.advantages < 0))).to(t.logp.dtype)


def uncertain(entropy: Tensor, share: float) -> Tensor:
    """1.0 for the ``share`` of tokens where the policy was least sure (arXiv 2506.01939)."""
    if not len(entropy):
        return entropy
    return (entropy >= entropy_threshold(entropy, share)).to(entropy.dtype)


def entropy_threshold(entropy: Tensor, share: float) -> Tensor:
    """Find the least entropy of the ``share`` of tokens where the policy was least sure."""
    return torch.quantile(entropy.float(), 1 - share)


Loss = Callable[[Tokens, Tensor, Tensor, Clip], Tensor]
LOSSES: dict[str, Loss] = {
    "dapo": clipped,
    "grpo": clipped,
    "bnpo": clipped,
    "dr_grpo": clipped,
    "luspo": clipped,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
}
CLIPPED = frozenset(name for name, loss in LOSSES.items() if loss is clipped)
