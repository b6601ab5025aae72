"""The learner: one optimizer step from a batch of samples."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import UserError
from agentrl.learner.logprobs import causal_lm, output_head, token_logprobs
from agentrl.learner.loss import Tokens, uncertain
from agentrl.learner.objective import Measures, Objective, objective
from agentrl.learner.packing import MicroBatch
from agentrl.learner.ranks import Ranks
from agentrl.learner.reduction import REDUCTIONS
from agentrl.learner.states import PADDED, PREFIX, Packing, difference
from agentrl.lora import has_adapter
from agentrl.types import Sample

CHECKED = 4  # rows by which a model shows that prefixes can be shared


@dataclass(frozen=True)
class LossSettings(Objective):
    """What ``Learner.update`` computes."""

    temperature: float = 1.0
    max_grad_norm: float = 1.0
    updates: int = 1  # optimizer steps on one batch; from the second on the ratio is not 1, and may be clipped
    packing: str = "prefix"  # or "padded"
    token_budget: int = 8192  # tokens in one forward and backward pass, padding included
    threads: int | None = None  # torch's threads while learning; all cores by default
    longest: int = 4096  # tokens an episode may sample at most, for dr_grpo
    gradient_checkpointing: bool = False  # layers keep their inputs alone, and compute the rest again
    ref_sync_steps: int | None = None  # updates after which the reference becomes the policy of that moment


class Learner:
    """Updates the policy in place; ``version`` counts its updates.

    The old policy is the one before the batch's first update, whose logprobs are then ``logp.detach()``: no forward
    pass is made for them. ``old`` has them for the rows of the last update: (trained,), in order, on the CPU.
    """

    def __init__(
        self,
        policy: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        settings: LossSettings,
        ranks: Ranks | None = None,
    ) -> None:
        self.policy, self.settings, self.version = policy, settings, 0
        self.ranks, self._share = ranks or Ranks(), 1.0
        self.ranks.agree(policy.parameters())
        self._optimizers = list(optimizers)
        self.old: list[Tensor] = []
        self._head = output_head(policy)
        self._packing = PADDED if settings.packing == "padded" else None  # not yet known
        self._reference: Any = (policy if has_adapter(policy) else frozen_copy(policy)) if settings.beta else None
        self._layers = checkpointed(policy) if settings.gradient_checkpointing else []
        self._base_lrs = [[g["lr"] for g in o.param_groups] for o in self._optimizers]

    def set_lr(self, share: float) -> None:
        """Set every learning rate to a share of what it was at the start."""
        self._share = share
        for optimizer, lrs in zip(self._optimizers, self._base_lrs, strict=True):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * share

    def state(self) -> dict[str, Any]:
        """All that the next update depends on, beside the settings."""
        policy = set(self.policy.parameters())
        groups = [g for o in self._optimizers for g in o.param_groups]
        reference = self._reference if self._reference is not self.policy else None
        return {
            "policy": {n: p.detach().cpu() for n, p in self.policy.named_parameters() if p.requires_grad},
            "optimizers": [o.state_dict() for o in self._optimizers],
            "masters": [p.detach().cpu() for g in groups for p in g["params"] if p not in policy],
            "reference": None if reference is None else reference.state_dict(),
            "version": self.version,
            "shared": None if self._packing is None else self._packing is PREFIX,
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there, and the other processes too.

        Raises:
            UserError: it is another model's.
        """
        if not self.ranks.follows:
            self.ranks.tell(state)
        own = {n: p for n, p in self.policy.named_parameters() if p.requires_grad}
        given = state["policy"]
        if own.keys() != given.keys() or any(own[n].shape != given[n].shape for n in own):
            raise UserError("the checkpoint is of another model, or of another adapter")
        for name, parameter in own.items():
            parameter.copy_(given[name])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        policy = set(self.policy.parameters())
        masters = [p for o in self._optimizers for g in o.param_groups for p in g["params"] if p not in policy]
        for master, saved in zip(masters, state["masters"], strict=True):
            master.copy_(saved)
        if state["reference"] is not None and self._reference is not None:
            self._reference.load_state_dict(state["reference"])
        self.version = state["version"]
        if state["shared"] is not None:  # what other rows would have shown is not asked
            self._packing = PREFIX if state["shared"] else PADDED

    def follow(self) -> None:
        """Learn from what the first process tells, to its end."""
        while (told := self.ranks.heard()) is not None:
            if isinstance(told, dict):
                self.load(told)
                continue
            share, rows = told
            self.set_lr(share)
            self.update(rows)

    def update(self, rows: Sequence[Sample]) -> dict[str, float]:
        """Learn from a batch; the metrics of its tokens. Without rows nothing is changed, and nothing is said."""
        self.old = []
        if not rows:
            return {}
        if not self.ranks.follows:
            self.ranks.tell((self._share, list(rows)))
        s = self.settings
        torch.set_num_threads(s.threads or os.cpu_count() or 1)  # the engine may want fewer
        lengths = [sum(r.loss_mask) for r in rows]
        packing = self._chosen(rows)
        batches = packing.pack(rows, REDUCTIONS[s.loss](lengths, s.longest), s.token_budget)
        seen = [_Seen(self._reference_logprobs(packing, b)) for b in batches]
        acting = self._find_uncertain(packing, batches, seen) if s.top_entropy_quantile < 1.0 else float(sum(lengths))
        measures, total = Measures(), 0.0
        for _ in range(s.updates):
            for batch, known in self.ranks.own([*zip(batches, seen, strict=True)]):
                with packing.held(causal_lm(self.policy)), self._recomputing():
                    loss, measured = self._loss(packing, batch, known, acting)
                    loss.backward()  # type: ignore[no-untyped-call]
                measures.add(measured)
                total += float(loss.detach())
            norm = self._step()
        mine = [known.old.cpu() for known in self.ranks.own(seen) if known.old is not None]
        everyone, measures = self.ranks.gathered((total, measures, mine)), Measures()
        for _, own, _ in everyone:
            measures.add(own)
        self.old = _in_order(rows, batches, self.ranks.put_together([own for *_, own in everyone]))
        return {
            "loss": sum(loss for loss, *_ in everyone) / s.updates,
            "grad_norm": norm,
            "trained_tokens": float(sum(lengths)),
            "trained_rows": float(len(rows)),
            **measures.values(),
        }

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Inside, layers keep their inputs alone, if that is wanted. They alone are told that they are being trained,
        which transformers asks for: what is in them stays as it was, dropout off."""
        for layer in self._layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer.training = False

    def _step(self) -> float:
        """One step of the optimizers, unless a gradient is not finite: a NaN in the policy cannot be taken back."""
        self.ranks.add_up(self.policy.parameters())
        parameters = [p for p in self.policy.parameters() if p.grad is not None]
        norm = float(nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm))
        for optimizer in self._optimizers:
            if isfinite(norm):
                optimizer.step()
        self.policy.zero_grad(set_to_none=True)
        self.version += isfinite(norm)
        every = self.settings.ref_sync_steps
        if self._reference is not None and every and isfinite(norm) and self.version % every == 0:
            self._reference.load_state_dict(self.policy.state_dict())
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

    def _loss(self, packing: Packing, batch: MicroBatch, known: _Seen, acting: float) -> tuple[Tensor, Measures]:
        """The loss of a micro-batch, its share of the step's. ``acting``: tokens of the step that the bonus counts."""
        s = self.settings
        logp, entropy = self._logprobs(packing, batch)
        known.old = logp.detach() if known.old is None else known.old
        device = logp.device
        sampled, advantages, weights, index = (
            t.to(device) for t in (batch.logprobs, batch.advantages, batch.weights, batch.row_index)
        )
        tokens = Tokens(logp, known.old, sampled, advantages, index, len(batch.rows), entropy, known.ref)
        each, measures = objective(s, tokens, known.uncertain)
        loss = (each * weights).sum()
        if s.entropy_coef:
            kept = entropy if known.uncertain is None else entropy * known.uncertain
            loss = loss - s.entropy_coef * kept.sum() / max(acting, 1.0)
        return loss, measures

    def _logprobs(self, packing: Packing, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        states = packing.states(self.policy, batch)
        targets, wanted = batch.targets.to(states.device), bool(self.settings.entropy_coef)
        return token_logprobs(self._head, states, targets, self.settings.temperature, entropy_gradient=wanted)

    @torch.no_grad()
    def _reference_logprobs(self, packing: Packing, batch: MicroBatch) -> Tensor | None:
        reference = self._reference
        if reference is None:
            return None
        with reference.disable_adapter() if has_adapter(reference) else nullcontext():
            states = packing.states(reference, batch)
            targets = batch.targets.to(states.device)
            logp, _ = token_logprobs(output_head(reference), states, targets, self.settings.temperature)
        return logp

    @torch.no_grad()
    def _find_uncertain(self, packing: Packing, batches: Sequence[MicroBatch], seen: Sequence[_Seen]) -> float:
        """Mark the step's tokens of the highest entropy, by a pass of their own; how many there are."""
        entropies = []
        for batch, known in zip(batches, seen, strict=True):
            known.old, entropy = self._logprobs(packing, batch)
            entropies.append(entropy)
        marks = uncertain(torch.cat(entropies), self.settings.top_entropy_quantile)
        for known, mark in zip(seen, torch.split(marks, [len(e) for e in entropies]), strict=True):
            known.uncertain = mark
        return float(marks.sum())


@dataclass
class _Seen:
    """What is known of a micro-batch's tokens before it is learned from."""

    ref: Tensor | None
    old: Tensor | None = None
    uncertain: Tensor | None = None


def _in_order(rows: Sequence[Sample], batches: Sequence[MicroBatch], values: Sequence[Tensor]) -> list[Tensor]:
    """What the micro-batches have of their trained tokens, one piece for each row."""
    pairs = ((b.rows, b.by_row(v)) for b, v in zip(batches, values, strict=True))
    found = {id(row): own for its, pieces in pairs for row, own in zip(its, pieces, strict=True)}
    return [found[id(row)] for row in rows]


def checkpointed(policy: nn.Module) -> list[nn.Module]:
    """The layers, made to keep their inputs alone while they are in training mode.

    Raises:
        UserError: the model has no such layers.
    """
    model = causal_lm(policy)
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise UserError(f"learner.gradient_checkpointing: {str(error).splitlines()[0]}") from None
    return [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) and m is not model.base_model]


def frozen_copy(policy: nn.Module) -> nn.Module:
    """The policy of now, which is not trained."""
    return copy.deepcopy(policy).eval().requires_grad_(False)
