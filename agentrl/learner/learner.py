"""The learner: from a batch of samples to optimizer steps.

``Learner.update`` packs the rows into micro-batches, computes hidden states, logprobs and the loss of each, sums the
gradients over all processes, and steps the optimizers.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.errors import UserError
from agentrl.learner.activation_memory import (
    FEWEST,
    count_affordable_tokens,
    estimate_owed_bytes,
    measure_kept_bytes,
    read_memory,
)
from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.forward_passes import ForwardPasses, swap_values
from agentrl.learner.hidden_states import (
    PACKINGS,
    PADDED,
    PREFIX,
    Packing,
    choose_plain_packing,
    prove_prefix_sharing,
)
from agentrl.learner.losses.losses import Tokens
from agentrl.learner.losses.objective import LossMetrics, Objective, combine_metrics, compute_token_losses
from agentrl.learner.losses.reduction import reduce_rows
from agentrl.learner.optimizer_offload import OptimizerOffload
from agentrl.learner.packing import MicroBatch, estimate_cost
from agentrl.learner.router_balance import find_router_balance
from agentrl.learner.sharding import (
    ShardedPolicy,
    choose_shape,
    cut_like,
    gather_optimizer,
    gather_tensor,
    load_optimizer,
    read_local,
    shard_policy,
)
from agentrl.learner.updates import MicroBatchState, Update, cut_batch, order_by_row
from agentrl.models.device_copy import copy_to_device
from agentrl.models.lm_head import LmHead, NotProven, unwrap_model
from agentrl.types import Sample

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


_RESET, _STATE = "reset", "state"  # what rank 0 broadcasts for it
Optimizers = Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class LossSettings(Objective):
    """Settings of ``Learner.update``: the objective, and how it is computed."""

    temperature: float = 1.0
    repetition_penalty: float = 1.0
    max_grad_norm: float = 1.0
    num_iterations: int = 1  # optimizer steps on one batch; from the second on the ratio is not 1, and may be clipped
    packing: str = "prefix"  # or "padded"
    max_tokens_per_microbatch: int | None = None  # in one pass, padding included; None: as the memory allows
    threads: int | None = None  # torch's threads while learning; all cores by default
    router_aux_loss_coef: float | None = None  # of the experts' balancing loss; the model's own by default
    longest: int = 4096  # tokens an episode may sample at most, for dr_grpo
    gradient_checkpointing: bool = False  # layers keep only their inputs, and compute the rest again
    bf16: bool = False  # linear layers multiply in bfloat16, beside weights in single precision
    ref_sync_steps: int | None = None  # updates after which the reference moves towards the policy of that moment
    ref_mixup_alpha: float = 1.0  # the policy's share of it then
    optimizer_offload: bool = False  # what the optimizers hold is on the CPU between updates


class Learner:
    """Updates the policy in place; ``version`` counts the updates.

    The old policy is the policy before the batch's first update. There its logprobs are ``logp.detach()``: a forward
    pass is made for them only where a batch is cut into several optimizer steps. ``learned`` holds what the last update
    knew of each row's trained tokens, (trained, 3), on the CPU: the old logprob, d loss / d logprob at the first
    iteration (weight and KL term included), and the weight of the importance-sampling rule; None for a row that did not
    go through the model.

    The reference of the KL term is the policy as it was given, with its adapter: a copy of the trained parameters.

    In several processes the policy is cut into shards, and each trains its own (`agentrl.learner.sharding`). ``policy``
    stays whole in rank 0 and follows every update; in the others it is the shards.

    Args:
        optimizers: of the policy's parameters; where those are cut, a function from the policy in shards to them.
        sharding: how they are, over the processes of the group.
    """

    def __init__(
        self,
        policy: PreTrainedModel | PeftModel,
        optimizers: Optimizers | Callable[[PreTrainedModel | PeftModel], Optimizers],
        settings: LossSettings,
        process_group: ProcessGroup | None = None,
        sharding: str = "none",
    ) -> None:
        self.policy, self.settings, self.version = policy, settings, 0
        self.process_group = process_group or ProcessGroup()
        self.process_group.broadcast_parameters(policy.parameters())
        self.learned: list[Tensor | None] = []
        self._plain, why = choose_plain_packing(policy)
        if why and settings.router_aux_loss_coef:
            raise UserError(
                f"learner.router_aux_loss_coef {settings.router_aux_loss_coef:g}: not where a model is trained the "
                f"plain way ({why}); set it to 0"
            )
        self._balance = find_router_balance(policy, settings.router_aux_loss_coef)
        if why:
            left_out = (
                f"; its config's router_aux_loss_coef {self._balance.coef:g} is left out" if self._balance else ""
            )
            self._balance = None
            warnings.warn(
                f"{type(unwrap_model(policy)).__name__} is trained the plain way; {why}{left_out}", stacklevel=2
            )
        self._lm_head = self._plain.build_head(policy)
        self.shards = self._shard(sharding)
        self.trained_policy = policy if self.shards is None else self.shards.policy
        self.optimizers = list(optimizers(self.trained_policy) if callable(optimizers) else optimizers)
        shares = self._plain is PADDED and settings.packing != "padded"
        self._packing = None if shares else self._plain  # None: not yet known
        self._reference = self._copy_trained() if settings.beta else None
        self._passes = ForwardPasses(self.trained_policy, self._lm_head, settings, self.process_group, self.shards)
        self._base_lrs = self.lrs
        self.offload = OptimizerOffload(self.trained_policy, self.optimizers) if settings.optimizer_offload else None
        if self.offload is not None:
            self.offload.offload()
        self.affordable_tokens: int | None = None  # of a micro-batch, once they are counted

    def _shard(self, sharding: str) -> ShardedPolicy | None:
        """Cut the policy into shards where there are several processes; the head is the shards' own from then on."""
        group = self.process_group
        shape = choose_shape(sharding, group.world_size, group.local_size)
        if shape is None:
            return None
        shards = shard_policy(self.policy, shape, keep=not group.is_worker)
        if isinstance(self._lm_head, LmHead):
            layer = unwrap_model(shards.policy).get_output_embeddings()
            self._lm_head = replace(self._lm_head, layer=layer)
        return shards

    @property
    def old_logprobs(self) -> list[Tensor | None]:
        """List the old logprobs of each row of the last update, (trained,); None for one that was not passed."""
        return [None if values is None else values[:, 0] for values in self.learned]

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        """List the parameters that are trained, by name: whole ones."""
        return {n: p for n, p in self.policy.named_parameters() if p.requires_grad}

    @property
    def _own(self) -> dict[str, nn.Parameter]:
        """List the parameters that the optimizers step, by name: this process's shards of them."""
        return {n: p for n, p in self.trained_policy.named_parameters() if p.requires_grad}

    def _copy_trained(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self._own.items()}

    def reset_optimizers(self) -> None:
        """Let the optimizers forget their running means, in every process."""
        self.process_group.broadcast(_RESET)
        self._forget()

    def _forget(self) -> None:
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def copy_weights(self) -> dict[str, Tensor]:
        """Return a copy of the trained parameters, on the CPU."""
        return {n: p.detach().to("cpu", copy=True) for n, p in self._trained.items()}

    @contextmanager
    def use_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the policy other weights, in this process alone, until the block ends."""
        trained = self._trained
        with swap_values(trained, {n: weights[n].to(p.device) for n, p in trained.items()}):
            yield

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Give the policy other weights, in this process alone, to be used and not to be trained."""
        for name, parameter in self._trained.items():
            parameter.copy_(weights[name])

    def _list_masters(self) -> list[Tensor]:
        """List the single-precision copies that the optimizers step instead of the policy's own parameters."""
        policy = set(self.trained_policy.parameters())
        return [p for o in self.optimizers for g in o.param_groups for p in g["params"] if p not in policy]

    def _onloaded(self) -> AbstractContextManager[None]:
        """Have what the optimizers hold on the policy's device until the block ends."""
        return nullcontext() if self.offload is None else self.offload.onloaded()

    @property
    def lrs(self) -> list[list[float]]:
        """Return the learning rates: of each optimizer those of its groups."""
        return [[float(g["lr"]) for g in o.param_groups] for o in self.optimizers]

    def set_lr(self, scale: float) -> None:
        """Set every learning rate to ``scale`` times what it was at the start."""
        self._set_lrs([[lr * scale for lr in lrs] for lrs in self._base_lrs])

    def _set_lrs(self, lrs: Sequence[Sequence[float]]) -> None:
        for optimizer, own in zip(self.optimizers, lrs, strict=True):
            for group, lr in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = lr

    def state(self) -> dict[str, Any]:
        """Return all that the next update depends on, beside the settings; of shards, the whole of it."""
        if self.shards is not None:
            self.process_group.broadcast(_STATE)
        optimizers, reference = self._gather_state()
        return {
            "policy": {n: p.detach().cpu() for n, p in self._trained.items()},
            "optimizers": optimizers,
            "optimizer_names": self._optimizer_names,
            "masters": [p.detach().cpu() for p in self._list_masters()],
            "reference": reference,
            "version": self.version,
            "packing": None if self._packing is None else self._packing.name,
            "affordable_tokens": self.affordable_tokens,
        }

    def _gather_state(self) -> tuple[list[dict[str, Any]], dict[str, Tensor] | None]:
        """Gather what the optimizers keep, and the reference. Every process takes part, and rank 0 gets them."""
        keep = not self.process_group.is_worker
        if self.shards is None:
            optimizers = [o.state_dict() for o in self.optimizers]
        else:
            with self._onloaded():  # gathered from device to device
                optimizers = [gather_optimizer(o, keep=keep) for o in self.optimizers]
        if self._reference is None:
            return optimizers, None
        gathered = ((n, gather_tensor(t)) for n, t in self._reference.items())
        return optimizers, {n: t.cpu() for n, t in gathered if keep}

    @property
    def _optimizer_names(self) -> list[str]:
        return [type(o).__name__ for o in self.optimizers]

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state``, in every process.

        Raises:
            UserError: it is another model's.
        """
        if not self.process_group.is_worker:
            self.process_group.broadcast(state)
        trained, saved = self._own, state["policy"]
        if trained.keys() != saved.keys() or any(trained[n].shape != saved[n].shape for n in trained):
            raise UserError("the checkpoint is of another model, or of another adapter")
        if self._optimizer_names != state["optimizer_names"]:
            raise UserError(
                f"the checkpoint has the state of {' and '.join(state['optimizer_names'])}, and this run steps "
                f"{' and '.join(self._optimizer_names)}: resume with the same learner.optimizer, or optimizers="
            )
        for name, parameter in trained.items():
            _copy_part(parameter, saved[name])
        if self.shards is not None and not self.process_group.is_worker:
            self.load_weights(saved)
        with self._onloaded():
            for optimizer, optimizer_state in zip(self.optimizers, state["optimizers"], strict=True):
                load_optimizer(optimizer, optimizer_state)
            for master, values in zip(self._list_masters(), state["masters"], strict=True):
                master.copy_(values)
        if state["reference"] is not None and self._reference is not None:
            for name, reference in self._reference.items():
                _copy_part(reference, state["reference"][name])
        self.version = state["version"]
        if state["packing"] is not None:  # not proven again: other rows might show something else
            self._packing = PACKINGS[state["packing"]]
        self.affordable_tokens = state.get(
            "affordable_tokens"
        )  # other memory is free now, and sums would be rounded so

    def run_worker(self) -> None:
        """Run every update that rank 0 broadcasts, until it broadcasts None."""
        while (message := self.process_group.receive()) is not None:
            if isinstance(message, dict):
                self.load(message)
                continue
            if message == _RESET:
                self._forget()
                continue
            if message == _STATE:
                self._gather_state()
                continue
            settings, lrs, packing, *rows = message
            self.settings = LossSettings(**settings)
            self._set_lrs(lrs)
            with self._onloaded(), self._passes.prepared(self.settings):
                self._run_steps(PACKINGS[packing], *rows)

    def update(
        self,
        rows: Sequence[Sample],
        weights: Sequence[float] | None = None,
        updates: Sequence[int] | None = None,
    ) -> dict[str, float]:
        """Learn from a batch; return the metrics of its tokens.

        Rows that contribute nothing are not passed through the model: those without a token, and, where neither a KL
        term nor an entropy bonus nor a balancing loss nor the loss acts on every row, those whose advantages are all 0.
        If no row contributes, nothing is changed.

        Args:
            rows: all that count in the denominators.
            weights: of each row's tokens in the loss; by default the loss's own reduction over these rows.
            updates: the optimizer step that each row belongs to, from 0 on; by default all belong to one.

        Returns:
            ``scored_rows`` and ``scored_tokens`` are in the denominators, ``trained_rows`` and ``trained_tokens`` have
            an advantage, ``forwarded_rows`` and ``forwarded_tokens`` went through the model: means, minima and maxima
            are over those.
        """
        s = self.settings
        lengths = [sum(r.loss_mask) for r in rows]
        weights = reduce_rows(s.loss_entry.entry, lengths, s.longest) if weights is None else weights
        teaches = [any(a for a, m in zip(r.advantages, r.loss_mask, strict=True) if m) for r in rows]
        all_act = bool(s.beta or s.entropy_coef or (s.top_entropy_quantile < 1.0 and any(teaches)))
        all_act = all_act or s.loss_entry.entry.every_row or self._balance is not None
        forwarded = [i for i, n in enumerate(lengths) if n and (teaches[i] or all_act)]
        trained = [i for i in forwarded if teaches[i]]
        self.learned = [None] * len(rows)
        counts = {
            f"{name}_{unit}": float(value)
            for name, indices in (("scored", range(len(rows))), ("trained", trained), ("forwarded", forwarded))
            for unit, value in (("rows", len(indices)), ("tokens", sum(lengths[i] for i in indices)))
        }
        if not forwarded:
            return counts
        forwarded_rows, forwarded_weights = [rows[i] for i in forwarded], [weights[i] for i in forwarded]
        numbers = [updates[i] if updates else 0 for i in forwarded]
        packing = self._choose_packing(forwarded_rows)  # rank 0 decides for all
        settings = {f.name: getattr(s, f.name) for f in fields(s)}  # as they are now: a stage has its own
        settings["max_tokens_per_microbatch"] = self._choose_max_tokens(packing, forwarded_rows)
        self.process_group.broadcast((settings, self.lrs, packing.name, forwarded_rows, forwarded_weights, numbers))
        with self._onloaded(), self._passes.prepared(self.settings):
            metrics, learned = self._run_steps(packing, forwarded_rows, forwarded_weights, numbers)
        for i, values in zip(forwarded, learned, strict=True):
            self.learned[i] = values
        return counts | metrics

    def _run_steps(
        self, packing: Packing, rows: Sequence[Sample], weights: Sequence[float], numbers: Sequence[int]
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Make the optimizer steps of a batch, on this process's shard; return metrics and each row's ``learned``."""
        s = self.settings
        torch.set_num_threads(s.threads or os.cpu_count() or 1)  # the engine may want fewer
        updates = [self._prepare(packing, *own) for own in cut_batch(rows, weights, numbers)]
        for update in updates[1:]:  # the policy before the first one is the old one of all
            self._passes.compute_old_logprobs(packing, update)
        metrics, grad_norms = LossMetrics(), []
        total: Tensor | float = 0.0
        for _ in range(s.num_iterations):
            for update in updates:
                for batch, state in update.shard:
                    with self._passes.differentiated(packing):
                        loss, batch_metrics = self._compute_loss(packing, batch, state, update)
                        loss.backward()  # type: ignore[no-untyped-call]
                    state.keep_gradients()
                    metrics.add(batch_metrics)
                    total = loss.detach().double() + total  # on the device: nobody waits for it
                self._passes.idle(packing, update, backward=True)
                grad_norms.append(self._step_optimizers())
        self._publish()
        own_learned = [[state.learned() for _, state in update.shard] for update in updates]
        gathered = self.process_group.all_gather((float(total), metrics.totals(), own_learned))
        learned: list[Tensor] = []
        for shards in zip(*(own for *_, own in gathered), strict=True):
            learned += self.process_group.unshard(shards)
        step = {"loss": sum(loss for loss, *_ in gathered) / len(grad_norms), "grad_norm": fmean(grad_norms)}
        batches = [b for update in updates for b in update.batches]
        return combine_metrics([totals for _, totals, _ in gathered]) | step, order_by_row(rows, batches, learned)

    def _prepare(self, packing: Packing, rows: Sequence[Sample], weights: Sequence[float]) -> Update:
        """Pack the rows of an optimizer step, and compute what stays the same over all iterations."""
        batches = packing.pack(rows, weights, self._choose_max_tokens(packing, rows))
        if self.shards is not None:  # those of a round wait for each other
            batches = sorted(batches, key=estimate_cost, reverse=True)
        shard = [(batch, MicroBatchState()) for batch in self.process_group.shard(batches)]
        rounds = -(-len(batches) // self.process_group.world_size)
        idle = rounds - len(shard) if self.shards is not None else 0
        bonus_tokens = float(sum(sum(r.loss_mask) for r in rows))
        update = Update(batches, shard, bonus_tokens, sum(len(r.token_ids) for r in rows), idle)
        if self._reference is not None and self.settings.beta:
            self._passes.compute_ref_logprobs(packing, update, self._own, self._reference)
        if self.settings.top_entropy_quantile < 1.0:
            bonus_tokens = self._passes.mark_high_entropy(packing, update)
        return replace(update, bonus_tokens=bonus_tokens)

    @torch.no_grad()
    def _publish(self) -> None:
        """Let the whole policy of rank 0 follow the shards."""
        if self.shards is None:
            return
        whole = self._trained
        for name, values in self.shards.gather():
            if not self.process_group.is_worker:
                whole[name].copy_(values)

    def _step_optimizers(self) -> float:
        """Sum the gradients over all processes, clip them, and step; return their norm before clipping.

        If it is not finite, nothing is changed: a NaN in the policy cannot be taken back.
        """
        if self.shards is None:
            self.process_group.all_reduce_gradients(self.policy.parameters())
        parameters = [p for p in self.trained_policy.parameters() if p.grad is not None]
        grad_norm = float(gather_tensor(nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm)))
        for optimizer in self.optimizers:
            if isfinite(grad_norm):
                optimizer.step()
        self.trained_policy.zero_grad(set_to_none=True)
        self.version += isfinite(grad_norm)
        every = self.settings.ref_sync_steps
        if self._reference is not None and every and isfinite(grad_norm) and self.version % every == 0:
            self._mix_reference(self.settings.ref_mixup_alpha)
        return grad_norm

    @torch.no_grad()
    def _mix_reference(self, alpha: float) -> None:
        """Move the reference towards the policy: by all of the way where ``alpha`` is 1."""
        trained = self._own
        reference = self._reference or {}
        self._reference = {n: r.mul(1.0 - alpha).add(trained[n], alpha=alpha) for n, r in reference.items()}

    def _choose_packing(self, rows: Sequence[Sample]) -> Packing:
        """Choose shared prefixes if it is proven that this model gives the same numbers then."""
        if self._packing is None and sum(len(row.starts) for row in rows) > 1:
            try:
                prove_prefix_sharing(self.policy)
                self._packing = PREFIX
            except NotProven as reason:
                self._packing = self._plain
                warnings.warn(
                    f"{type(self.policy).__name__}: the prefixes that rows share are computed for each of them "
                    f'(learner.packing = "padded"): {reason}',
                    stacklevel=2,
                )
        return self._packing or self._plain

    def _choose_max_tokens(self, packing: Packing, rows: Sequence[Sample]) -> int:
        """Return the tokens of a micro-batch: those of the settings, or as many as the memory has room for.

        They are counted once, on the first rows: a limit that changed with what is free would change what is rounded.
        """
        if (given := self.settings.max_tokens_per_microbatch) is not None:
            return given
        if self.affordable_tokens is None:
            policy, trained = unwrap_model(self.policy), [read_local(p) for p in self._own.values()]
            shortest = sorted(rows, key=lambda row: len(row.token_ids))[:2]
            (batch, *_) = packing.pack(shortest, [1.0] * len(shortest), FEWEST)
            tokens = len(batch.forest.token_ids) if packing is PREFIX else sum(map(len, batch.contexts))
            with packing.context(policy):
                per_token = measure_kept_bytes(policy, lambda: packing.compute_states(self.policy, batch)) / tokens
            if layers := self._passes.checkpointed:  # each keeps its input; one at a time has all
                inputs = len(layers) * policy.config.get_text_config().hidden_size * policy.dtype.itemsize
                per_token = per_token / len(layers) + inputs
            total, free = read_memory(policy.device)
            free -= estimate_owed_bytes(self.optimizers, trained)
            free -= 0 if self.offload is None else self.offload.bytes_away
            self.affordable_tokens = count_affordable_tokens(per_token, total, free, self.process_group.local_size)
        return self.affordable_tokens

    def _compute_loss(
        self, packing: Packing, batch: MicroBatch, state: MicroBatchState, update: Update
    ) -> tuple[Tensor, LossMetrics]:
        """Compute a micro-batch's share of the step's loss. The entropy bonus is a mean over the step's tokens."""
        s = self.settings
        none: AbstractContextManager[list[Tensor]] = nullcontext([])
        with none if self._balance is None else self._balance.record(self.trained_policy) as router_logits:
            logp, entropy = self._passes.compute_logprobs(packing, batch)
        state.old_logprobs = logp.detach() if state.old_logprobs is None else state.old_logprobs
        device = logp.device
        sampling, advantages, weights, index = (
            copy_to_device(t, device) for t in (batch.logprobs, batch.advantages, batch.weights, batch.row_index)
        )
        tokens = Tokens(
            logp, state.old_logprobs, sampling, advantages, index, len(batch.rows), entropy, state.ref_logprobs
        )
        if batch.has_demonstrated:
            sampled = ~sampling.isnan()
            own = torch.where(sampled, sampling, state.old_logprobs)
            at = copy_to_device((~batch.logprobs.isnan()).nonzero()[:, 0], device)
            tokens = replace(tokens, sampling_logprobs=own, sampled=sampled, sampled_at=at)
        losses, correction, metrics = compute_token_losses(s, tokens, state.high_entropy_mask)
        state.begin(logp, correction)
        loss = (losses * weights).sum()
        if s.entropy_coef:
            bonus = entropy if state.high_entropy_mask is None else entropy * state.high_entropy_mask
            loss = loss - s.entropy_coef * bonus.sum() / max(update.bonus_tokens, 1.0)
        if self._balance is not None:
            balance = self._balance.compute(router_logits, batch, shares_prefixes=packing is PREFIX)
            tokens_here = sum(len(row.token_ids) for row in batch.rows)
            loss = loss + self._balance.coef * balance * tokens_here / update.tokens
            metrics.record_mean("aux_loss", balance, tokens_here)
        return loss, metrics


def _copy_part(parameter: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor to a parameter, or this process's part of it to a shard."""
    parameter.copy_(cut_like(whole, parameter) if isinstance(parameter, DTensor) else whole)
