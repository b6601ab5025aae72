"""The learner: one optimizer step from a batch of samples."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import UserError
from agentrl.learner.logprobs import causal_lm, output_head, token_logprobs
from agentrl.learner.loss import Tokens, entropy_threshold
from agentrl.learner.objective import Measures, Objective, combine, objective
from agentrl.learner.packing import MicroBatch
from agentrl.learner.ranks import Ranks
from agentrl.learner.reduction import REDUCTIONS
from agentrl.learner.states import PADDED, PREFIX, Packing, check_trainable, refuse_sharing
from agentrl.models.capabilities import NotProven
from agentrl.types import Sample


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
    pass is made for them. ``old`` has them for the rows of the last update: (trained,), in order, on the CPU; None for
    a row that did not go through the model.

    The reference of the KL term is the policy as it was given, an adapter with it: a copy of what is trained.
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
        self.old: list[Tensor | None] = []
        self._head = output_head(policy)
        check_trainable(policy)
        self._packing = PADDED if settings.packing == "padded" else None  # not yet known
        self._reference = {n: p.detach().clone() for n, p in self._trained.items()} if settings.beta else None
        self._layers = checkpointed(policy) if settings.gradient_checkpointing else []
        self._base_lrs = [[g["lr"] for g in o.param_groups] for o in self._optimizers]

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        """List the parameters that are trained, by name."""
        return {n: p for n, p in self.policy.named_parameters() if p.requires_grad}

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
        return {
            "policy": {n: p.detach().cpu() for n, p in self._trained.items()},
            "optimizers": [o.state_dict() for o in self._optimizers],
            "masters": [p.detach().cpu() for g in groups for p in g["params"] if p not in policy],
            "reference": None if self._reference is None else {n: t.cpu() for n, t in self._reference.items()},
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
        own = self._trained
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
            for name, kept in self._reference.items():
                kept.copy_(state["reference"][name])
        self.version = state["version"]
        if state["shared"] is not None:  # what other rows would have shown is not asked
            self._packing = PREFIX if state["shared"] else PADDED

    def follow(self) -> None:
        """Learn from what the first process tells, to its end."""
        while (told := self.ranks.heard()) is not None:
            if isinstance(told, dict):
                self.load(told)
                continue
            share, shared, rows, weights = told
            self.set_lr(share)
            self._learn(PREFIX if shared else PADDED, rows, weights)

    def update(self, rows: Sequence[Sample], weights: Sequence[float] | None = None) -> dict[str, float]:
        """Learn from a batch; return the metrics of its tokens.

        Rows that contribute nothing are not passed through the model: those without a token, and, where neither a KL
        term nor an entropy bonus acts on every row, those whose advantages are all 0. Where none contributes, nothing
        is changed.

        Args:
            rows: all that count in the denominators.
            weights: of each row's tokens in the loss; by default the loss's own reduction over these rows.

        Returns:
            ``scored_rows`` and ``scored_tokens`` are in the denominators, ``trained_rows`` and ``trained_tokens`` have
            an advantage, ``forwarded_rows`` and ``forwarded_tokens`` went through the model: means, minima and maxima
            are over those.
        """
        s = self.settings
        lengths = [sum(r.loss_mask) for r in rows]
        weights = REDUCTIONS[s.loss](lengths, s.longest) if weights is None else weights
        teaches = [any(a for a, m in zip(r.advantages, r.loss_mask, strict=True) if m) for r in rows]
        everyone = bool(s.beta or s.entropy_coef or (s.top_entropy_quantile < 1.0 and any(teaches)))
        forwarded = [i for i, n in enumerate(lengths) if n and (teaches[i] or everyone)]
        trained = [i for i in forwarded if teaches[i]]
        self.old = [None] * len(rows)
        counts = {
            f"{name}_{what}": float(value)
            for name, which in (("scored", range(len(rows))), ("trained", trained), ("forwarded", forwarded))
            for what, value in (("rows", len(which)), ("tokens", sum(lengths[i] for i in which)))
        }
        if not forwarded:
            return counts
        its, own = [rows[i] for i in forwarded], [weights[i] for i in forwarded]
        packing = self._chosen(its)  # the first process decides for all
        self.ranks.tell((self._share, packing is PREFIX, its, own))
        told, old = self._learn(packing, its, own)
        for i, values in zip(forwarded, old, strict=True):
            self.old[i] = values
        return counts | told

    def _learn(
        self, packing: Packing, rows: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Make the optimizer steps of a batch, this process its share; return metrics, and each row's old logprobs."""
        s = self.settings
        torch.set_num_threads(s.threads or os.cpu_count() or 1)  # the engine may want fewer
        batches = packing.pack(rows, weights, s.token_budget)
        own = [(b, _Seen(self._reference_logprobs(packing, b))) for b in self.ranks.own(batches)]
        acting = float(sum(sum(r.loss_mask) for r in rows))
        if s.top_entropy_quantile < 1.0:
            acting = self._find_uncertain(packing, own)
        measures, total = Measures(), 0.0
        for _ in range(s.updates):
            for batch, known in own:
                with packing.held(causal_lm(self.policy)), self._recomputing():
                    loss, measured = self._loss(packing, batch, known, acting)
                    loss.backward()  # type: ignore[no-untyped-call]
                measures.add(measured)
                total += float(loss.detach())
            norm = self._step()
        mine = [known.old.cpu() for _, known in own if known.old is not None]
        everyone = self.ranks.gathered((total, measures.totals(), mine))
        old = _in_order(rows, batches, self.ranks.put_together([its for *_, its in everyone]))
        told = {"loss": sum(loss for loss, *_ in everyone) / s.updates, "grad_norm": norm}
        return told | combine([totals for _, totals, _ in everyone]), old

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
            self._reference = {n: p.detach().clone() for n, p in self._trained.items()}
        return norm

    def _chosen(self, rows: Sequence[Sample]) -> Packing:
        """Prefixes are shared where it is proven that this model gives the same numbers then."""
        if self._packing is None and len(rows) > 1:
            try:
                refuse_sharing(self.policy)
                self._packing = PREFIX
            except NotProven as why:
                self._packing = PADDED
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
        if self._reference is None:
            return None
        with _in_place(self._trained, self._reference):
            return self._logprobs(packing, batch)[0]

    @torch.no_grad()
    def _find_uncertain(self, packing: Packing, own: Sequence[tuple[MicroBatch, _Seen]]) -> float:
        """Mark the step's tokens of the highest entropy, by a pass of their own; return how many there are.

        Each process passes its own micro-batches; the threshold is that of all.
        """
        entropies = []
        for batch, known in own:
            known.old, known.uncertain = self._logprobs(packing, batch)
            entropies.append(known.uncertain.cpu())
        everyone = [e for its in self.ranks.gathered(entropies) for e in its]
        least = entropy_threshold(torch.cat(everyone), self.settings.top_entropy_quantile)
        for (_, known), entropy in zip(own, entropies, strict=True):
            known.uncertain = (entropy >= least).to(known.uncertain)
        return float(sum((e >= least).sum() for e in everyone))


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


@contextmanager
def _in_place(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the parameters other values until the block ends."""
    own = {name: p.data for name, p in parameters.items()}
    try:
        for name, p in parameters.items():
            p.data = values[name]
        yield
    finally:
        for name, p in parameters.items():
            p.data = own[name]
