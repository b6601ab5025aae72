"""The losses of a trained token, before importance sampling and reduction: pure functions, one entry a token.

Each is declared with `agentrl.loss`, which makes it a name of ``learner.loss``. A loss is called with the tokens and
``log_ratio``, the log ratio of `ratio`, by token or by row. This module is the catalogue of losses, so it loads no
torch: what is done here, tensors do.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from agentrl.learner.losses.ratio import row_mean, row_sum
from agentrl.settings.entries import Metric, loss

if TYPE_CHECKING:
    from torch import Tensor

Positive = Annotated[float, Field(gt=0)]
LossOutput = "Tensor | tuple[Tensor, dict[str, Tensor]]"  # losses, and values of metrics


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of a micro-batch, (tokens,) each; ``rows`` is the index of each one's row, of ``count``."""

    logprobs: Tensor  # of the policy now: the only one with a gradient
    old_logprobs: Tensor  # of the policy before the step's first update
    sampling_logprobs: Tensor  # the engine's
    advantages: Tensor
    rows: Tensor  # int64
    count: int
    entropy: Tensor
    ref_logprobs: Tensor | None = None  # of the reference model
    correction: Tensor | None = None  # the weights of the importance sampling rule; 1 everywhere without them
    by_row: bool = False  # the log ratio is of rows: importance_level = "sequence"
    sampled: Tensor | None = None  # where not all were: False for demonstrated ones, whose engine is the old policy
    sampled_at: Tensor | None = None  # int64: where ``sampled`` is True, as the host knew it

    def per_ratio(self, values: Tensor) -> Tensor:
        """Average values over each row where the ratio is of rows, so that it is counted once."""
        return row_mean(values, self.rows, self.count) if self.by_row else values


_CLIP_METRICS = {
    "clip_ratio/low_mean": Metric("share of the ratios below 1 - epsilon with a negative advantage"),
    "clip_ratio/high_mean": Metric("share of the ratios above 1 + epsilon_high with a positive advantage"),
    "clip_ratio/region_mean": Metric("clip_ratio/low_mean + clip_ratio/high_mean"),
    "clip_ratio/low_min": Metric("the smallest share of a row's tokens that is clipped below", "min"),
    "clip_ratio/high_max": Metric("the largest share of a row's tokens that is clipped above", "max"),
}


def _ppo_clip(
    t: Tokens,
    log_ratio: Tensor,
    *,
    epsilon: Positive = 0.2,
    epsilon_high: Positive = 0.28,
    delta: Annotated[float, Field(gt=1)] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's pessimistic clipped objective, negated; ``epsilon_high > epsilon`` is DAPO's clip-higher.

    Args:
        epsilon: lower clip of the ratio; from a batch's second update on.
        epsilon_high: upper clip of the ratio (arXiv 2503.14476).
        delta: cap of the ratio where the advantage is negative: two-sided clipping, INTELLECT-2.
    """
    ratio = log_ratio.exp()
    capped = ratio if delta is None else ratio.clamp(max=delta)
    losses = -(capped * t.advantages).minimum(ratio.clamp(1 - epsilon, 1 + epsilon_high) * t.advantages)
    low, high = clip_masks(t, capped.detach(), epsilon, epsilon_high)
    some = row_sum(low * 0 + 1, t.rows, t.count) > 0
    rows = slice(None if len(t.rows) else 0)  # no row where there is no token
    return losses, {
        "clip_ratio/low_mean": t.per_ratio(low),
        "clip_ratio/high_mean": t.per_ratio(high),
        "clip_ratio/region_mean": t.per_ratio(low + high),
        "clip_ratio/low_min": row_mean(low, t.rows, t.count).masked_fill(~some, inf)[rows],
        "clip_ratio/high_max": row_mean(high, t.rows, t.count).masked_fill(~some, -inf)[rows],
    }


def clip_masks(t: Tokens, ratio: Tensor, epsilon: float, epsilon_high: float) -> tuple[Tensor, Tensor]:
    """Mark the tokens whose gradient the clip takes away, below and above: 1.0, others 0.0."""
    low = (ratio < 1 - epsilon) & (t.advantages < 0)
    high = (ratio > 1 + epsilon_high) & (t.advantages > 0)
    return low.to(ratio.dtype), high.to(ratio.dtype)


_CLIP = "-min(r A, clip(r, 1 - {epsilon}, 1 + {epsilon_high}) A)"

dapo = loss(reduction="token_mean", metrics=_CLIP_METRICS, explain=_CLIP)(_ppo_clip)
grpo = loss(reduction="seq_mean_token_mean", metrics=_CLIP_METRICS, explain=_CLIP)(_ppo_clip)
bnpo = loss(reduction="update_token_mean", metrics=_CLIP_METRICS, explain=_CLIP)(_ppo_clip)
dr_grpo = loss(reduction="seq_mean_token_sum_norm", metrics=_CLIP_METRICS, explain=_CLIP)(_ppo_clip)
luspo = loss(reduction="seq_mean_token_sum", metrics=_CLIP_METRICS, explain=_CLIP)(_ppo_clip)


def _check_cap(cap: float) -> float:
    """Refuse the values that are usual for a clip: they would make every weight that small."""
    if cap < 1:
        raise ValueError(f"{cap} caps cispo's weights below 1; 5.0 is usual")
    return cap


@loss(
    reduction="token_mean",
    metrics={"cispo_clip_ratio": "share of the ratios above epsilon_high with a positive advantage"},
    explain="-min(r, {epsilon_high}) A log p, the weight without gradient",
)
def cispo(
    t: Tokens, log_ratio: Tensor, *, epsilon_high: Annotated[float, AfterValidator(_check_cap)] = 5.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weigh REINFORCE by a capped ratio: no token loses its gradient (MiniMax-M1, arXiv 2506.13585).

    Args:
        epsilon_high: the cap of the ratio itself. TRL's usual 0.2 would make every weight 0.2.
    """
    ratio = log_ratio.exp()
    capped = (ratio > epsilon_high) & (t.advantages > 0)
    losses = -ratio.clamp(max=epsilon_high).detach() * t.advantages * t.logprobs
    return losses, {"cispo_clip_ratio": t.per_ratio(capped.to(ratio.dtype))}


@loss(reduction="seq_mean_token_mean", explain="-A sigmoid(tau (r - 1)) 4 / tau, tau 1 for A > 0, else 1.05")
def sapo(t: Tokens, log_ratio: Tensor) -> Tensor:
    """Gate softly instead of clipping, more sharply where the advantage is negative (SAPO, arXiv 2511.20347)."""
    tau = log_ratio.new_ones(t.advantages.shape).masked_fill(t.advantages <= 0, 1.05)
    return -t.advantages * (tau * (log_ratio.exp() - 1)).sigmoid() * 4 / tau


@loss(
    reduction="token_mean",
    metrics={"vespo/phi_seq_mean": "mean weight of a row: exp(lam + k s - lam e^s), s its log ratio to the engine"},
    explain="-phi A log p, phi a gamma-shaped weight of the row's whole ratio",
    corrects=True,
)
def vespo(t: Tokens, log_ratio: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Weigh REINFORCE by a gamma-shaped function of the row's whole ratio, which contains the correction."""
    weight = _vespo_weight(t)
    return -weight * t.advantages * t.logprobs, {"vespo/phi_seq_mean": row_mean(weight, t.rows, t.count)}


def _vespo_weight(t: Tokens) -> Tensor:
    """Compute exp(lam + k s - lam e^s), without a gradient.

    s is the row's log ratio to the engine; (k, lam) depend on the advantage's sign.
    """
    assert t.correction is not None
    floor, positive = log(1e-8), t.advantages >= 0
    moved = (t.logprobs - t.old_logprobs).detach().clamp(-20.0, 20.0)
    s = row_sum(moved + t.correction.detach().log().clamp(floor, 20.0), t.rows, t.count)[t.rows].clamp(floor, 20.0)
    k = s.new_full(s.shape, 3.0).masked_fill(positive, 2.0)
    lam = 5.0 - k
    return (lam + k * s - lam * s.exp()).exp().nan_to_num(0.0, 0.0, 0.0)


@loss(
    reduction="token_mean",
    metrics={"nll": Metric("mean of -log p over the imitated tokens; exp of it is their perplexity", unit="nats")},
    explain="-A log p",
)
def sft(t: Tokens, log_ratio: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Imitate: -A log p, where A is 1 of a demonstration, or of an episode that is kept (supervised fine-tuning)."""
    return -t.advantages * t.logprobs, {"nll": -t.logprobs.detach()[t.advantages > 0]}


def k3_kl(t: Tokens) -> Tensor:
    """Estimate KL(policy || reference) by k3, which is never negative (Schulman 2020)."""
    assert t.ref_logprobs is not None
    d = t.ref_logprobs - t.logprobs
    return d.exp() - d - 1


def off_policy_mask(t: Tokens, threshold: float) -> Tensor:
    """Mark the tokens to train, 1.0: not those of a row with a negative advantage that the policy has left, 0.0.

    The policy has left a row where mean(sampled - logp) is over the threshold.
    """
    left = row_mean(t.sampling_logprobs - t.logprobs.detach(), t.rows, t.count)[t.rows] > threshold
    return (~(left & (t.advantages < 0))).to(t.logprobs.dtype)


def high_entropy_mask(entropy: Tensor, share: float) -> Tensor:
    """Mark the ``share`` of tokens with the highest entropy, 1.0, others 0.0 (arXiv 2506.01939)."""
    if not len(entropy):
        return entropy
    return (entropy >= entropy_threshold(entropy, share)).to(entropy.dtype)


def entropy_threshold(entropy: Tensor, share: float) -> Tensor:
    """Find the lowest entropy among the ``share`` of tokens with the highest."""
    return entropy.float().quantile(1 - share)
