"""The objective of a policy update: ratio, loss, masks, correction, KL and entropy, in the order that TRL has them.

``objective`` works on the trained tokens of a micro-batch, ``policy_loss`` on plain (rows, tokens) tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.errors import nearest
from agentrl.learner.correction import CORRECTIONS
from agentrl.learner.loss import (
    CLIPPED,
    LOSSES,
    Clip,
    Tokens,
    gamma_weight,
    k3,
    on_policy_rows,
    out_of_range,
    uncertain,
)
from agentrl.learner.ratio import LEVELS, row_mean, row_sum
from agentrl.learner.reduction import REDUCTIONS


@dataclass(frozen=True)
class Objective:
    """What is computed; the names are those of TRL where TRL has one.

    Args:
        importance_level: whose ratio: each ``token``'s, or its whole ``sequence``'s (GSPO).
        epsilon_high: also the cap of cispo, where TRL's 0.2 would make every weight 0.2.
        beta: of the KL term to the reference; ``kl_ratio`` multiplies it by the ratio, as TRL does.
        correction, correction_min, correction_max: of the engine's logprobs; see ``learner.correction``.
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
    kl_ratio: bool = True
    correction: str = "token_truncate"
    correction_min: float | None = None
    correction_max: float | None = 2.0
    off_policy_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        for what, known in (("loss", LOSSES), ("importance_level", LEVELS), ("correction", CORRECTIONS)):
            if (value := getattr(self, what)) not in known:
                raise ValueError(f"no {what} {value!r}{nearest(value, known)}")
        if self.loss == "vespo" and not self.correction.startswith("token"):
            raise ValueError(f"vespo sums the corrections of tokens; correction {self.correction!r} is one of rows")


@dataclass
class Measures:
    """Sums and counts that add up over micro-batches, so that a mean over them is the step's own."""

    sums: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    least: dict[str, Tensor] = field(default_factory=dict)
    most: dict[str, Tensor] = field(default_factory=dict)

    def mean(self, name: str, values: Tensor) -> None:
        self.sums[name] = values.detach().sum(), values.new_tensor(float(len(values)))

    def add(self, other: Measures) -> None:
        for name, (total, count) in other.sums.items():
            before = self.sums.get(name, (total * 0, count * 0))
            self.sums[name] = before[0] + total, before[1] + count
        for mine, its, pick in ((self.least, other.least, torch.minimum), (self.most, other.most, torch.maximum)):
            mine |= {name: pick(mine[name], value) if name in mine else value for name, value in its.items()}

    def totals(self) -> Totals:
        """Read the numbers off their device: what may travel between processes."""
        return Totals(
            {name: (float(total), float(count)) for name, (total, count) in self.sums.items()},
            {name: float(value) for name, value in self.least.items()},
            {name: float(value) for name, value in self.most.items()},
        )

    def values(self) -> dict[str, float]:
        return combine([self.totals()])


class Totals(NamedTuple):
    """`Measures` as plain numbers: sums with their counts, minima, maxima."""

    sums: Mapping[str, tuple[float, float]]
    least: Mapping[str, float]
    most: Mapping[str, float]


def combine(parts: Sequence[Totals]) -> dict[str, float]:
    """Compute the means, minima and maxima over all parts."""
    sums: dict[str, tuple[float, float]] = {}
    ends: dict[str, float] = {}
    for part in parts:
        for name, (total, count) in part.sums.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + total, before[1] + count
        for values, pick in ((part.least, min), (part.most, max)):
            ends |= {name: pick(ends.get(name, value), value) for name, value in values.items()}
    return {name: total / max(count, 1.0) for name, (total, count) in sums.items()} | ends


def objective(o: Objective, t: Tokens, chosen: Tensor | None = None) -> tuple[Tensor, Measures]:
    """The loss of each token, (tokens,), not yet reduced nor with the entropy bonus; and what there is to tell.

    Args:
        chosen: 1.0 for the tokens that the entropy mask keeps; by default this micro-batch's own quantile decides.
    """
    clip, measures = Clip(o.epsilon, o.epsilon_high, o.delta), Measures()
    bounds = o.correction_min, o.correction_max
    w = LEVELS[o.importance_level](t.logp, t.old, t.rows, t.count)
    rho = CORRECTIONS[o.correction](t.old, t.sampled, t.rows, t.count, bounds)
    loss = LOSSES[o.loss](t, w, rho, clip)
    if o.off_policy_threshold is not None:
        loss = loss * on_policy_rows(t, o.off_policy_threshold)
    if o.top_entropy_quantile < 1.0:
        loss = loss * (uncertain(t.entropy.detach(), o.top_entropy_quantile) if chosen is None else chosen)
    if o.loss != "vespo":  # it holds the correction inside
        loss = loss * rho
    if o.beta:
        kl = k3(t) * w.exp() if o.kl_ratio else k3(t)
        loss = loss + o.beta * kl
        measures.mean("kl", kl)
    _measure(o, t, w, rho, clip, measures)
    return loss, measures


def _measure(o: Objective, t: Tokens, w: Tensor, rho: Tensor, clip: Clip, measures: Measures) -> None:
    """A ratio by row is counted once a row."""

    def by_level(values: Tensor) -> Tensor:
        return row_mean(values, t.rows, t.count) if o.importance_level == "sequence" else values

    measures.mean("entropy", t.entropy)
    difference = (t.old - t.sampled).abs()
    measures.mean("sampling/sampling_logp_difference/mean", difference)
    measures.mean("sampling/importance_sampling_ratio/mean", rho)
    if len(rho):
        measures.most["sampling/sampling_logp_difference/max"] = difference.max()
        measures.least["sampling/importance_sampling_ratio/min"] = rho.min()
        measures.most["sampling/importance_sampling_ratio/max"] = rho.max()
    if o.loss in CLIPPED:
        low, high = out_of_range(t, w, clip)
        measures.mean("clip_ratio/low_mean", by_level(low))
        measures.mean("clip_ratio/high_mean", by_level(high))
        measures.mean("clip_ratio/region_mean", by_level(low + high))
        some = row_sum(torch.ones_like(low), t.rows, t.count) > 0
        if some.any():
            measures.least["clip_ratio/low_min"] = row_mean(low, t.rows, t.count)[some].min()
            measures.most["clip_ratio/high_max"] = row_mean(high, t.rows, t.count)[some].max()
    elif o.loss == "cispo":
        capped = (w.exp() > o.epsilon_high) & (t.advantages > 0)
        measures.mean("cispo_clip_ratio", by_level(capped.to(w.dtype)))
    elif o.loss == "vespo":
        phi = row_mean(gamma_weight(t, rho), t.rows, t.count)
        measures.mean("vespo/phi_seq_mean", phi)


def policy_loss(
    objective_: Objective,
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
    """The loss of one micro-batch, and its metrics, from plain tensors: what TRL computes from the same.

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
    o = objective_
    mask = (completion_mask if tool_mask is None else completion_mask * tool_mask).bool()
    if o.beta and ref is None:
        raise ValueError("beta is over 0: the KL term needs ref, the reference's logprobs")
    if entropy is None and (o.entropy_coef or o.top_entropy_quantile < 1.0):
        raise ValueError("entropy_coef and top_entropy_quantile need entropy")
    count = len(logp)
    rows = torch.arange(count, device=logp.device)[:, None].expand_as(mask)[mask]
    each = advantages[:, None].expand_as(mask) if advantages.ndim == 1 else advantages
    t = Tokens(
        logp[mask],
        old[mask],
        sampling[mask],
        each[mask],
        rows,
        count,
        torch.zeros_like(logp)[mask] if entropy is None else entropy[mask],
        None if ref is None else ref[mask],
    )
    loss, measures = objective(o, t)
    lengths = mask.sum(1).tolist()
    if o.loss in ("dapo", "cispo", "vespo") and tokens_in_step is not None:
        weights = [1 / max(tokens_in_step, 1.0)] * count
    else:
        weights = [w / micro_batches for w in REDUCTIONS[o.loss](lengths, longest or mask.shape[1])]
    total = (loss * loss.new_tensor(weights)[rows]).sum()
    told = measures.values()
    if o.entropy_coef:
        told |= {"policy_loss": float(total.detach()), "entropy_coef": o.entropy_coef}
        kept = uncertain(t.entropy.detach(), o.top_entropy_quantile) if o.top_entropy_quantile < 1.0 else 1.0
        acting = (t.entropy.detach() * 0 + kept).sum().clamp(min=1)
        total = total - o.entropy_coef * (t.entropy * kept).sum() / acting / micro_batches
    if entropy is None:
        del told["entropy"]
    return total, told
