"""The objective of a policy update: ratio, loss, masks, importance sampling, KL and entropy, in TRL's order.

``compute_token_losses`` works on the trained tokens of a micro-batch, ``compute_policy_loss`` on plain (rows, tokens)
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentrl.errors import ContractError, suggest
from agentrl.learner.losses.losses import Tokens, high_entropy_mask, k3_kl, off_policy_mask
from agentrl.learner.losses.ratio import LEVELS
from agentrl.learner.losses.reduction import reduce_rows
from agentrl.settings.catalogue import BoundEntry, bind_entry, check_correction
from agentrl.settings.entries import Pick


@dataclass(frozen=True)
class Objective:
    """Settings of the objective; the names are those of TRL where TRL has one.

    Args:
        loss, importance_sampling_mode: functions, or names of entries: agentrl's own, a package's, ``module:function``.
        loss_args, importance_sampling_args: their parameters. Those that are arguments here, such as ``epsilon``, may
            be given here: an entry that has no such parameter does not get it.
        importance_level: the ratio of each ``token``, or of its whole ``sequence`` (GSPO).
        beta: of the KL term to the reference; ``use_bias_correction_kl`` multiplies it by the ratio, as TRL does.
        off_policy_threshold: rows with a negative advantage and mean(sampled - logp) above it are not trained.
        top_entropy_quantile: only this share of the tokens is trained, those of the highest entropy.
        entropy_coef: of the entropy bonus, whose gradient flows through ``Tokens.entropy``.
    """

    loss: str | Callable[..., object] = "dapo"
    importance_level: str = "token"
    epsilon: float | None = None
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    importance_sampling_mode: str | Callable[..., object] = "token_truncate"
    importance_sampling_min: float | None = None
    importance_sampling_max: float | None = 2.0
    off_policy_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    loss_args: Mapping[str, Any] = field(default_factory=dict)
    importance_sampling_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.importance_level not in LEVELS:
            raise ValueError(f"no importance_level {self.importance_level!r}{suggest(self.importance_level, LEVELS)}")
        check_correction(self.loss_entry, self.correction_entry)

    @cached_property
    def loss_entry(self) -> BoundEntry:
        """Return the loss with its parameters. Raises UserError if there is none of that name."""
        bounds = {n: v for n in ("epsilon", "epsilon_high", "delta") if (v := getattr(self, n)) is not None}
        return bind_entry("loss", self.loss, self.loss_args, lenient=bounds)

    @cached_property
    def correction_entry(self) -> BoundEntry:
        """Return the importance-sampling rule with its parameters. Raises UserError if there is none of that name."""
        bounds = {n: getattr(self, n) for n in ("importance_sampling_min", "importance_sampling_max")}
        name = self.importance_sampling_mode
        return bind_entry("importance_sampling", name, self.importance_sampling_args, lenient=bounds)


@dataclass
class LossMetrics:
    """Metrics of micro-batches. Sums and counts add up, so a mean over micro-batches is the step's own."""

    sums: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    min: dict[str, Tensor] = field(default_factory=dict)
    max: dict[str, Tensor] = field(default_factory=dict)

    def record(self, name: str, values: Tensor, pick: Pick = "mean") -> None:
        """Record a metric that is the mean, the least or the largest of ``values``."""
        values = values.detach()
        if pick == "mean":
            self.sums[name] = values.sum(), values.new_full((), float(len(values)))
        elif len(values):
            own, end = (self.min, values.min) if pick == "min" else (self.max, values.max)
            own[name] = end()

    def record_mean(self, name: str, mean: Tensor, count: float) -> None:
        """Record a metric that is the mean over ``count`` values."""
        self.sums[name] = mean.detach() * count, mean.new_full((), float(count))

    def add(self, other: LossMetrics) -> None:
        """Add the metrics of another micro-batch."""
        for name, (total, count) in other.sums.items():
            before = self.sums.get(name, (total * 0, count * 0))
            self.sums[name] = before[0] + total, before[1] + count
        for own, others, pick in ((self.min, other.min, torch.minimum), (self.max, other.max, torch.maximum)):
            own |= {name: pick(own[name], value) if name in own else value for name, value in others.items()}

    def totals(self) -> _Totals:
        """Read the numbers off their device, all at once, to be sent between processes."""
        tensors = [*(t for pair in self.sums.values() for t in pair), *self.min.values(), *self.max.values()]
        numbers = iter(torch.stack([t.double() for t in tensors]).tolist() if tensors else [])
        sums = {name: (next(numbers), next(numbers)) for name in self.sums}
        return _Totals(sums, {name: next(numbers) for name in self.min}, {name: next(numbers) for name in self.max})

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


def _call_correction(bound: BoundEntry, t: Tokens) -> Tensor:
    """Compute each token's weight of the importance-sampling rule: a constant. Raises ContractError."""
    with _refuse_changes(bound.what, vars(t)):
        weights = bound.call_safely(t)
    _check_values(bound.what, weights, t)
    result: Tensor = weights.detach()
    return result


def _call_loss(bound: BoundEntry, t: Tokens, log_ratio: Tensor, metrics: LossMetrics) -> Tensor:
    """Compute each token's loss, and record the loss's own metrics. Raises ContractError."""
    with _refuse_changes(bound.what, {**vars(t), "log_ratio": log_ratio}):
        output = bound.call_safely(t, log_ratio)
    losses, values = output if isinstance(output, tuple) and len(output) == 2 else (output, {})
    _check_values(bound.what, losses, t)
    if t.logprobs.requires_grad and torch.is_grad_enabled() and not losses.requires_grad:
        raise ContractError(f"{bound.what} has no gradient: compute it from log_ratio or t.logprobs, without detach")
    declared = bound.entry.metrics
    if not isinstance(values, Mapping) or (unknown := sorted(set(values) - set(declared))):
        names = "" if not isinstance(values, Mapping) else f" {unknown[0]!r}"
        raise ContractError(f"{bound.what} returned a metric{names} that it does not declare: @loss(metrics={{...}})")
    for name, own in values.items():
        if not isinstance(own, Tensor) or own.ndim != 1:
            raise ContractError(f"{bound.what}: metric {name!r} is a tensor of values, (n,), not {_describe(own)}")
        metrics.record(name, own.to(losses.dtype), declared[name].pick)
    result: Tensor = losses
    return result


@contextmanager
def _refuse_changes(what: str, inputs: Mapping[str, object]) -> Iterator[None]:
    """Raise ContractError if the block changes a tensor of ``inputs`` in place: terms and passes to come read it."""
    tensors = {n: v for n, v in inputs.items() if isinstance(v, Tensor) and not v.is_inference()}
    before = {n: v._version for n, v in tensors.items()}
    yield
    if changed := [n for n, v in tensors.items() if v._version != before[n]]:
        name = changed[0] if changed[0] == "log_ratio" else f"t.{changed[0]}"
        raise ContractError(
            f"{what} changes {name} in place, which other terms and passes read; make a new tensor: {name} * 2, not "
            f"{name}.mul_(2)"
        )


def _check_values(what: str, values: object, t: Tokens) -> None:
    """Raise ContractError for what is not one floating-point number a token."""
    if not isinstance(values, Tensor) or values.shape != t.logprobs.shape or not values.is_floating_point():
        raise ContractError(
            f"{what} returns one number a trained token, a floating-point tensor of shape ({len(t.logprobs)},), "
            f"not {_describe(values)}"
        )


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"{value!r:.80}"


class _TokenLosses(NamedTuple):
    """The loss of each token, (tokens,), not yet reduced and without the entropy bonus.

    ``correction`` is the weight of the importance-sampling rule, (tokens,), without a gradient.
    """

    losses: Tensor
    correction: Tensor
    metrics: LossMetrics


def compute_token_losses(o: Objective, t: Tokens, entropy_mask: Tensor | None = None) -> _TokenLosses:
    """Compute the loss of each token, and the metrics.

    Args:
        entropy_mask: 1.0 for the tokens to train; by default those over this micro-batch's own quantile.

    Raises:
        ContractError: the loss or the importance-sampling rule is not agentrl's own, and broke its contract.
    """
    metrics, log_ratio = LossMetrics(), LEVELS[o.importance_level](t.logprobs, t.old_logprobs, t.rows, t.count)
    rho = _call_correction(o.correction_entry, t)
    t = replace(t, correction=rho, by_row=o.importance_level == "sequence")
    loss = _call_loss(o.loss_entry, t, log_ratio, metrics)
    if o.off_policy_threshold is not None:
        loss = loss * off_policy_mask(t, o.off_policy_threshold)
    if o.top_entropy_quantile < 1.0:
        if entropy_mask is None:
            entropy_mask = high_entropy_mask(t.entropy.detach(), o.top_entropy_quantile)
        loss = loss * entropy_mask
    if not o.loss_entry.entry.corrects:
        loss = loss * rho
    if o.beta:
        kl = k3_kl(t) * log_ratio.exp() if o.use_bias_correction_kl else k3_kl(t)
        loss = loss + o.beta * kl
        metrics.record("kl", kl)
    metrics.record("entropy", t.entropy)
    _record_sampling(t, rho, metrics)
    return _TokenLosses(loss, rho, metrics)


def _record_sampling(t: Tokens, rho: Tensor, metrics: LossMetrics) -> None:
    """Record how far the engine was from the policy, over the tokens that an engine sampled."""
    difference = (t.old_logprobs - t.sampling_logprobs).abs()
    if t.sampled is not None:
        if t.sampled_at is None:
            t = replace(t, sampled_at=t.sampled.nonzero()[:, 0])
        assert t.sampled_at is not None
        if not len(t.sampled_at):
            return
        difference, rho = difference.index_select(0, t.sampled_at), rho.index_select(0, t.sampled_at)
    metrics.record("sampling/sampling_logp_difference/mean", difference)
    metrics.record("sampling/sampling_logp_difference/max", difference, "max")
    for pick in ("mean", "min", "max"):
        metrics.record(f"sampling/importance_sampling_ratio/{pick}", rho, pick)


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
        tokens_in_step: trained tokens of the whole optimizer step, for the losses that are means over them
            (token_mean); this micro-batch's by default.
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
    losses, _, metrics = compute_token_losses(o, t)
    lengths = mask.sum(1).tolist()
    entry = o.loss_entry.entry
    if entry.reduction == "token_mean" and tokens_in_step is not None:
        weights = [1 / max(tokens_in_step, 1.0)] * count
    else:
        weights = [w / micro_batches for w in reduce_rows(entry, lengths, longest or mask.shape[1])]
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
