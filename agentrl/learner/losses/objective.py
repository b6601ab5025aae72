"""The objective of a policy update: ratio, loss, masks, importance sampling, KL and entropy, in TRL's order.

``compute_token_losses`` works on the trained tokens of a micro-batch, ``compute_policy_loss`` on plain (rows, tokens)
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.errors import suggest
from agentrl.learner.losses.correction import CORRECTIONS
from agentrl.learner.losses.losses import (
    CLIPPED,
    LOSSES,
    Clip,
    Tokens,
    clip_masks,
    high_entropy_mask,
    k3_kl,
    off_policy_mask,
    vespo_weight,
)
from agentrl.learner.losses.ratio import LEVELS, row_mean, row_sum
from agentrl.learner.losses.reduction import REDUCTIONS


@dataclass(frozen=True)
class Objective:
    """Settings of the objective; the names are those of TRL where TRL has one.

    Args:
        importance_level: the ratio of each ``token``, or of its whole ``sequence`` (GSPO).
        epsilon_high: also the cap of cispo, where TRL's 0.2 would make every weight 0.2.
        beta: of the KL term to the reference; ``use_bias_correction_kl`` multiplies it by the ratio, as TRL does.
        importance_sampling_mode, importance_sampling_min, importance_sampling_max: of the engine's logprobs; see the
            settings of those names.
        off_policy_threshold: rows with a negative advantage and mean(sampled - logp) above it are not trained.
        top_entropy_quantile: only this share of the tokens is trained, those of the highest entropy.
        entropy_coef: of the entropy bonus, whose gradient flows through ``Tokens.entropy``.
    """

    loss: str = "dapo"
    importance_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.28
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    importance_sampling_mode: str = "token_truncate"
    importance_sampling_min: float | None = None
    importance_sampling_max: float | None = 2.0
    off_policy_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        for name, known in (("loss", LOSSES), ("importance_level", LEVELS), ("importance_sampling_mode", CORRECTIONS)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"no {name} {value!r}{suggest(value, known)}")
        if self.loss == "vespo" and not self.importance_sampling_mode.startswith("token"):
            raise ValueError(f"vespo sums the corrections of tokens; {self.importance_sampling_mode!r} is one of rows")


@dataclass
class LossMetrics:
    """Metrics of micro-batches. Sums and counts add up, so a mean over micro-batches is the step's own."""

    sums: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    min: dict[str, Tensor] = field(default_factory=dict)
    max: dict[str, Tensor] = field(default_factory=dict)

    def mean(self, name: str, values: Tensor) -> None:
        """Record a metric that is the mean of ``values``."""
        self.sums[name] = values.detach().sum(), values.new_tensor(float(len(values)))

    def add(self, other: LossMetrics) -> None:
        """Add the metrics of another micro-batch."""
        for name, (total, count) in other.sums.items():
            before = self.sums.get(name, (total * 0, count * 0))
            self.sums[name] = before[0] + total, before[1] + count
        for own, others, pick in ((self.min, other.min, torch.minimum), (self.max, other.max, torch.maximum)):
            own |= {name: pick(own[name], value) if name in own else value for name, value in others.items()}

    def totals(self) -> _Totals:
        """Read the numbers off their device, to be sent between processes."""
        return _Totals(
            {name: (float(total), float(count)) for name, (total, count) in self.sums.items()},
            {name: float(value) for name, value in self.min.items()},
            {name: float(value) for name, value in self.max.items()},
        )

    def values(self) -> dict[str, float]:
        """Compute the means, minima and maxima."""
        return combine_metrics([self.totals()])


class _Totals(NamedTuple):
    """`LossMetrics` as plain numbers: sums with their counts, minima, maxima."""

    sums: Mapping[str, tuple[float, float]]
    min: Mapping[str, float]
    max: Mapping[str, float]


def combine_metrics(parts: Sequence[_Totals]) -> dict[str, float]:
    """Compute the means, minima and maxima over all parts."""
    sums: dict[str, tuple[float, float]] = {}
    ends: dict[str, float] = {}
    for part in parts:
        for name, (total, count) in part.sums.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + total, before[1] + count
        for values, pick in ((part.min, min), (part.max, max)):
            ends |= {name: pick(ends.get(name, value), value) for name, value in values.items()}
    return {name: total / max(count, 1.0) for name, (total, count) in sums.items()} | ends


def compute_token_losses(o: Objective, t: Tokens, entropy_mask: Tensor | None = None) -> tuple[Tensor, LossMetrics]:
    """Compute the loss of each token, (tokens,), not yet reduced and without the entropy bonus; and the metrics.

    Args:
        entropy_mask: 1.0 for the tokens to train; by default those over this micro-batch's own quantile.
    """
    clip, metrics = Clip(o.epsilon, o.epsilon_high, o.delta), LossMetrics()
    bounds = o.importance_sampling_min, o.importance_sampling_max
    w = LEVELS[o.importance_level](t.logp, t.old, t.rows, t.count)
    rho = CORRECTIONS[o.importance_sampling_mode](t.old, t.sampled, t.rows, t.count, bounds)
    loss = LOSSES[o.loss](t, w, rho, clip)
    if o.off_policy_threshold is not None:
        loss = loss * off_policy_mask(t, o.off_policy_threshold)
    if o.top_entropy_quantile < 1.0:
        if entropy_mask is None:
            entropy_mask = high_entropy_mask(t.entropy.detach(), o.top_entropy_quantile)
        loss = loss * entropy_mask
    if o.loss != "vespo":  # it holds the correction inside
        loss = loss * rho
    if o.beta:
        kl = k3_kl(t) * w.exp() if o.use_bias_correction_kl else k3_kl(t)
        loss = loss + o.beta * kl
        metrics.mean("kl", kl)
    _add_metrics(o, t, w, rho, clip, metrics)
    return loss, metrics


def _add_metrics(o: Objective, t: Tokens, w: Tensor, rho: Tensor, clip: Clip, metrics: LossMetrics) -> None:
    """Add the metrics of a micro-batch. A ratio by row is counted once a row."""

    def by_level(values: Tensor) -> Tensor:
        return row_mean(values, t.rows, t.count) if o.importance_level == "sequence" else values

    metrics.mean("entropy", t.entropy)
    difference = (t.old - t.sampled).abs()
    metrics.mean("sampling/sampling_logp_difference/mean", difference)
    metrics.mean("sampling/importance_sampling_ratio/mean", rho)
    if len(rho):
        metrics.max["sampling/sampling_logp_difference/max"] = difference.max()
        metrics.min["sampling/importance_sampling_ratio/min"] = rho.min()
        metrics.max["sampling/importance_sampling_ratio/max"] = rho.max()
    if o.loss in CLIPPED:
        low, high = clip_masks(t, w, clip)
        metrics.mean("clip_ratio/low_mean", by_level(low))
        metrics.mean("clip_ratio/high_mean", by_level(high))
        metrics.mean("clip_ratio/region_mean", by_level(low + high))
        some = row_sum(torch.ones_like(low), t.rows, t.count) > 0
        if some.any():
            metrics.min["clip_ratio/low_min"] = row_mean(low, t.rows, t.count)[some].min()
            metrics.max["clip_ratio/high_max"] = row_mean(high, t.rows, t.count)[some].max()
    elif o.loss == "cispo":
        capped = (w.exp() > o.epsilon_high) & (t.advantages > 0)
        metrics.mean("cispo_clip_ratio", by_level(capped.to(w.dtype)))
    elif o.loss == "vespo":
        phi = row_mean(vespo_weight(t, rho), t.rows, t.count)
        metrics.mean("vespo/phi_seq_mean", phi)


def compute_policy_loss(
    objective: Objective,
    *,
    logp: Tensor,
    old: Tensor,
    sampling: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    tool_mask: Tensor | None = None,
    ref: Tensor | None = None,
    entropy: Tensor | None = None,
    tokens_in_step: float | None = None,
    micro_batches: int = 1,
    longest: int | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Compute the loss of one micro-batch, and its metrics, from plain tensors: what TRL computes from the same.

    Args:
        logp, old, sampling, ref, entropy: (rows, tokens): logprobs of the policy (with its gradient), of the policy
            that acted as the learner computes them, as the engine reported them, and of the reference; the entropy.
        advantages: (rows,) or (rows, tokens).
        completion_mask, tool_mask: (rows, tokens), 1 for tokens of the completion, and among them for sampled ones.
        tokens_in_step: trained tokens of the whole optimizer step, for the losses that are means over them (dapo,
            cispo, vespo); this micro-batch's by default.
        micro_batches: of the optimizer step; the other losses are the mean of micro-batches' losses, as in TRL.
        longest: what a completion could be at most, for dr_grpo; by default the tensors' width.

    Raises:
        ValueError: a term needs a tensor that is not given.
    """
    o = objective
    mask = (completion_mask if tool_mask is None else completion_mask * tool_mask).bool()
    if o.beta and ref is None:
        raise ValueError("beta is over 0: the KL term needs ref, the reference's logprobs")
    if entropy is None and (o.entropy_coef or o.top_entropy_quantile < 1.0):
        raise ValueError("entropy_coef and top_entropy_quantile need entropy")
    count = len(logp)
    rows = torch.arange(count, device=logp.device)[:, None].expand_as(mask)[mask]
    by_token = advantages[:, None].expand_as(mask) if advantages.ndim == 1 else advantages
    t = Tokens(
        logp[mask],
        old[mask],
        sampling[mask],
        by_token[mask],
        rows,
        count,
        torch.zeros_like(logp)[mask] if entropy is None else entropy[mask],
        None if ref is None else ref[mask],
    )
    losses, metrics = compute_token_losses(o, t)
    lengths = mask.sum(1).tolist()
    if o.loss in ("dapo", "cispo", "vespo") and tokens_in_step is not None:
        weights = [1 / max(tokens_in_step, 1.0)] * count
    else:
        weights = [w / micro_batches for w in REDUCTIONS[o.loss](lengths, longest or mask.shape[1])]
    total = (losses * losses.new_tensor(weights)[rows]).sum()
    values = metrics.values()
    if o.entropy_coef:
        values |= {"policy_loss": float(total.detach()), "entropy_coef": o.entropy_coef}
        marked = high_entropy_mask(t.entropy.detach(), o.top_entropy_quantile) if o.top_entropy_quantile < 1.0 else 1.0
        bonus_tokens = (t.entropy.detach() * 0 + marked).sum().clamp(min=1)
        total = total - o.entropy_coef * (t.entropy * marked).sum() / bonus_tokens / micro_batches
    if entropy is None:
        del values["entropy"]
    return total, values
