"""The learner: one optimizer step from a batch of samples."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.learner.logprobs import output_head, token_logprobs
from agentrl.learner.loss import LOSSES, clipped, out_of_range, truncated_importance
from agentrl.learner.muon import Muon
from agentrl.learner.packing import MicroBatch
from agentrl.learner.states import PADDED, PREFIX, Packing, difference
from agentrl.types import Sample

CHECKED = 4  # rows by which a model shows that prefixes can be shared


@dataclass(frozen=True)
class LossSettings:
    """What ``Learner.update`` computes; the names are those of TRL where TRL has one."""

    loss: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float = 0.28
    importance_cap: float = 2.0
    temperature: float = 1.0
    max_grad_norm: float = 1.0
    updates: int = 1  # optimizer steps on one batch; from the second on the ratio is not 1, and may be clipped
    packing: str = "prefix"  # or "padded"
    token_budget: int = 8192  # tokens in one forward and backward pass, padding included
    threads: int | None = None  # torch's threads while learning; all cores by default


class Learner:
    """Updates the policy in place; ``version`` counts its updates.

    The old policy is the one before the batch's first update, whose logprobs are then ``logp.detach()``: no forward
    pass is made for them.
    """

    def __init__(self, policy: Any, optimizers: Sequence[torch.optim.Optimizer], settings: LossSettings) -> None:
        self.policy, self.settings, self.version = policy, settings, 0
        self._optimizers = list(optimizers)
        self._head = output_head(policy)
        self._packing = PADDED if settings.packing == "padded" else None  # not yet known
        self._base_lrs = [[g["lr"] for g in o.param_groups] for o in self._optimizers]

    def set_lr(self, share: float) -> None:
        """Set every learning rate to a share of what it was at the start."""
        for optimizer, lrs in zip(self._optimizers, self._base_lrs, strict=True):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * share

    def update(self, rows: Sequence[Sample]) -> dict[str, float]:
        """Learn from a batch; the metrics of its tokens. Without rows nothing is changed, and nothing is said."""
        if not rows:
            return {}
        torch.set_num_threads(self.settings.threads or os.cpu_count() or 1)  # the engine may want fewer
        lengths = [sum(r.loss_mask) for r in rows]
        weights = LOSSES[self.settings.loss](lengths)
        packing = self._chosen(rows)
        batches = packing.pack(rows, weights, self.settings.token_budget)
        olds: list[Tensor | None] = [None] * len(batches)
        tally: dict[str, list[Tensor]] = {}
        for _ in range(self.settings.updates):
            for i, batch in enumerate(batches):
                loss, olds[i], parts = self._loss(packing, batch, olds[i])
                loss.backward()  # type: ignore[no-untyped-call]
                for name, part in parts.items():
                    tally.setdefault(name, []).append(part)
            norm = self._step()
        values = {name: torch.cat(parts) for name, parts in tally.items()}
        return {
            "loss": float(values["loss"].sum()) / self.settings.updates,
            "grad_norm": norm,
            "entropy": float(values["entropy"].mean()),
            "clip_ratio/region_mean": float(values["clip"].mean()),
            "trained_tokens": float(sum(lengths)),
            "trained_rows": float(len(rows)),
            "sampling/sampling_logp_difference/mean": float(values["difference"].mean()),
            "sampling/sampling_logp_difference/max": float(values["difference"].max()),
            "sampling/importance_sampling_ratio/min": float(values["rho"].min()),
            "sampling/importance_sampling_ratio/mean": float(values["rho"].mean()),
            "sampling/importance_sampling_ratio/max": float(values["rho"].max()),
        }

    def _step(self) -> float:
        """One step of the optimizers, unless a gradient is not finite: a NaN in the policy cannot be taken back."""
        parameters = [p for p in self.policy.parameters() if p.grad is not None]
        norm = float(nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm))
        for optimizer in self._optimizers:
            if isfinite(norm):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.version += isfinite(norm)
        return norm

    def _chosen(self, rows: Sequence[Sample]) -> Packing:
        """Prefixes are shared, once a few rows have shown that this model gives the same numbers then."""
        if self._packing is None and len(rows) > 1:
            alike = sorted(rows, key=lambda r: r.token_ids)[:CHECKED]
            why = difference(self.policy, self._head, MicroBatch(alike, [1.0] * len(alike)))
            self._packing = PADDED if why else PREFIX
            if why:
                warnings.warn(
                    f"{type(self.policy).__name__}: the prefixes that rows share are computed for each of them "
                    f'(learner.packing = "padded"): {why}',
                    stacklevel=2,
                )
        return self._packing or PADDED

    def _loss(
        self, packing: Packing, batch: MicroBatch, old: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss, the logprobs to take ratios to in later updates, and values of each token for the metrics."""
        s, device = self.settings, next(self.policy.parameters()).device
        states = packing.states(self.policy, batch)
        logp, entropy = token_logprobs(self._head, states, batch.targets.to(device), s.temperature)
        sampled, advantages, weights = (t.to(device) for t in (batch.logprobs, batch.advantages, batch.weights))
        old = logp.detach() if old is None else old
        rho = truncated_importance(old, sampled, s.importance_cap)
        loss = clipped(logp, old, advantages, s.epsilon, s.epsilon_high) * rho * weights
        parts = {
            "loss": loss.detach(),
            "entropy": entropy,
            "difference": (old - sampled).abs(),
            "rho": rho,
            "clip": out_of_range(logp, old, advantages, s.epsilon, s.epsilon_high),
        }
        return loss.sum(), old, parts


def make_optimizers(policy: nn.Module, name: str, lr: float, weight_decay: float = 0.0) -> list[torch.optim.Optimizer]:
    """``adamw`` for everything, or ``muon`` for the hidden matrices with AdamW for embeddings, norms and heads.

    Muon orthogonalises the update of a matrix (Jordan et al. 2024); scaled to AdamW's root mean square
    (arXiv 2502.16982), both can share one learning rate.
    """
    named = [(n, p) for n, p in policy.named_parameters() if p.requires_grad]
    if name == "adamw":
        return [torch.optim.AdamW([p for _, p in named], lr=lr, weight_decay=weight_decay)]
    tables = {id(m.weight) for m in policy.modules() if isinstance(m, nn.Embedding)}
    tables |= {id(p) for n, p in named if "lm_head" in n}
    matrices = [p for _, p in named if p.ndim == 2 and id(p) not in tables]
    rest = [p for _, p in named if p.ndim != 2 or id(p) in tables]
    return [
        Muon(matrices, lr=lr, weight_decay=weight_decay),
        torch.optim.AdamW(rest, lr=lr, weight_decay=weight_decay),
    ]
