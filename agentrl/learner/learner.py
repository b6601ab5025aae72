"""The learner: from a batch of samples to optimizer steps.

``Learner.update`` packs the rows into micro-batches, computes hidden states, logprobs and the loss of each, sums the
gradients over all processes, and steps the optimizers.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

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
    PREFIX,
    Packing,
)
from agentrl.learner.lent_weights import GATHER, WRITE, Errand, LentWeights
from agentrl.learner.losses.losses import Tokens
from agentrl.learner.losses.objective import LossMetrics, Objective, combine_metrics, compute_token_losses
from agentrl.learner.losses.reduction import reduce_rows
from agentrl.learner.packing import MicroBatch, estimate_cost
from agentrl.learner.packing_choice import PackingChoice
from agentrl.learner.part_writer import PartWriter, describe_ranks
from agentrl.learner.router_balance import find_router_balance
from agentrl.learner.router_replay import RouterReplay
from agentrl.learner.row_arrays import RowArrays
from agentrl.learner.row_exchange import receive_rows, scatter_rows
from agentrl.learner.sharded_state import read_like
from agentrl.learner.sharding import (
    ShardedPolicy,
    choose_shape,
    read_local,
    shard_policy,
)
from agentrl.learner.train_state import TrainState
from agentrl.learner.updates import (
    MicroBatchState,
    Update,
    UpdateOutline,
    cut_batch,
    order_by_row,
    outline_update,
    unshard,
)
from agentrl.models.device_copy import copy_to_device
from agentrl.models.lm_head import unwrap_model
from agentrl.types import Sample

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class _Weights(NamedTuple):
    """Other weights, as rank 0 broadcasts them."""

    values: Mapping[str, Tensor]


class _Measured(NamedTuple):
    """Rows by which every process measures what a pass keeps."""

    packing: str
    rows: Sequence[RowArrays]


_RESET, _STATE, _COPY = "reset", "state", "copy"  # what rank 0 broadcasts for it
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
    router_replay: bool = False  # tokens go to the experts that the engine's routers chose
    longest: int = 4096  # tokens an episode may sample at most, for dr_grpo
    gradient_checkpointing: bool = False  # layers keep only their inputs, and compute the rest again
    bf16: bool = False  # linear layers multiply in bfloat16, beside weights in single precision
    ref_sync_steps: int | None = None  # updates after which the reference moves towards the policy of that moment
    ref_mixup_alpha: float = 1.0  # the policy's share of it then
    optimizer_offload: bool = False  # what the optimizers hold is on the CPU between updates
    param_offload: bool = False  # shards and what the optimizers hold of them are on the CPU, and are stepped there


class Learner:
    """Updates the policy in place; ``version`` counts the updates.

    The old policy is the policy before the batch's first update. There its logprobs are ``logp.detach()``: a forward
    pass is made for them only where a batch is cut into several optimizer steps. ``learned`` holds what the last update
    knew of each row's trained tokens, (trained, 3), on the CPU: the old logprob, d loss / d logprob at the first
    iteration (weight and KL term included), and the weight of the importance-sampling rule; None for a row that did not
    go through the model.

    The reference of the KL term is the policy as it was given, with its adapter: a copy of the trained parameters.

    In several processes the policy is cut into shards, and each trains its own (`agentrl.learner.sharding`). ``policy``
    stays whole in rank 0 where it ``keeps_whole``, and follows every update; else it is the shards, and ``lent`` is how
    an engine reads them.

    Args:
        optimizers: of the policy's parameters; where those are cut, a function from the policy in shards to them.
        sharding: how they are, over the processes of the group.
        keeps_whole: rank 0 has the policy beside its shards, for an engine in this process.
    """

    def __init__(
        self,
        policy: PreTrainedModel | PeftModel,
        optimizers: Optimizers | Callable[[PreTrainedModel | PeftModel], Optimizers],
        settings: LossSettings,
        process_group: ProcessGroup | None = None,
        sharding: str = "none",
        keeps_whole: bool = True,
    ) -> None:
        self.policy, self.settings = policy, settings
        self.process_group = process_group or ProcessGroup()
        self.learned: list[Tensor | None] = []
        self.packing = PackingChoice.agree(policy, settings.packing, self.process_group)
        if (why := self.packing.why_plain) and settings.router_aux_loss_coef:
            raise UserError(
                f"learner.router_aux_loss_coef {settings.router_aux_loss_coef:g}: not where a model is trained the "
                f"plain way ({why}); set it to 0"
            )
        if why and settings.router_replay:
            raise UserError(f"learner.router_replay: not where a model is trained the plain way ({why}); leave it out")
        replay = RouterReplay.find(policy) if settings.router_replay else None
        self._balance = find_router_balance(policy, settings.router_aux_loss_coef)
        if why:
            left_out = (
                f"; its config's router_aux_loss_coef {self._balance.coef:g} is left out" if self._balance else ""
            )
            self._balance = None
            warnings.warn(
                f"{type(unwrap_model(policy)).__name__} is trained the plain way; {why}{left_out}", stacklevel=2
            )
        self._keeps_whole = keeps_whole and not self.process_group.is_worker
        self._asking = threading.Lock()
        self.shards = self._shard(sharding)
        self.lent: LentWeights | None = None
        if self.shards is not None and not keeps_whole:
            self.lent = LentWeights(self.shards, self.process_group, self._asked)
        self.part_writer = None if self.shards is None else PartWriter(self.process_group)
        trained = policy if self.shards is None else self.shards.policy
        self.train_state = TrainState(
            trained,
            optimizers(trained) if callable(optimizers) else optimizers,
            is_cut=self.shards is not None,
            has_reference=bool(settings.beta),
            is_offloaded=settings.optimizer_offload,
        )
        self._passes = ForwardPasses(trained, self.packing.lm_head, settings, self.process_group, self.shards, replay)
        self.affordable_tokens: int | None = None  # of a micro-batch, once they are counted

    def _shard(self, sharding: str) -> ShardedPolicy | None:
        """Cut the policy into shards where there are several processes; the head is the shards' own from then on."""
        group = self.process_group
        shape = choose_shape(sharding, group.world_size, group.local_size)
        with group.taking_part():
            if shape is None:
                group.broadcast_parameters(self.policy.parameters())
                return None
            if self.packing.chosen is None and not (self._keeps_whole or group.is_worker):
                self.packing.prove(self.policy)  # while it is whole
            shards = shard_policy(self.policy, shape, keep=self._keeps_whole, is_offloaded=self.settings.param_offload)
        self.packing.move_head(shards.policy)
        return shards

    @property
    def version(self) -> int:
        """Return how many updates were made."""
        return self.train_state.version

    @property
    def optimizers(self) -> Optimizers:
        """Return the optimizers that step the policy."""
        return self.train_state.optimizers

    @property
    def old_logprobs(self) -> list[Tensor | None]:
        """List the old logprobs of each row of the last update, (trained,); None for one that was not passed."""
        return [None if values is None else values[:, 0] for values in self.learned]

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        """List the parameters that are trained, by name: whole ones."""
        return {n: p for n, p in self.policy.named_parameters() if p.requires_grad}

    @contextmanager
    def _asked(self, message: object) -> Iterator[None]:
        """Ask the other processes for what is done inside; one thing at a time, whichever thread asks."""
        with self._asking, self.process_group.taking_part():
            self.process_group.broadcast(message)
            yield

    def reset_optimizers(self) -> None:
        """Let the optimizers forget their running means, in every process."""
        with self._asked(_RESET):
            self.train_state.forget()

    def copy_weights(self) -> dict[str, Tensor]:
        """Return a copy of the trained parameters, on the CPU."""
        if self.lent is None:
            return {n: p.detach().to("cpu", copy=True) for n, p in self._trained.items()}
        with self._asked(_COPY):
            return self._gather_trained()

    def _gather_trained(self) -> dict[str, Tensor]:
        """Gather the trained parameters; every process takes part, and rank 0 gets them, on the CPU."""
        assert self.shards is not None
        return {n: t.to("cpu", copy=True) for n, t in self.shards.gather() if t is not None}

    @contextmanager
    def use_weights(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the policy other weights until the block ends; a whole one in this process alone."""
        if self.lent is not None:
            own = self.copy_weights()
            self.load_weights(weights)
            try:
                yield
            finally:
                self.load_weights(own)
            return
        trained = self._trained
        with swap_values(trained, {n: weights[n].to(p.device) for n, p in trained.items()}):
            yield

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Give the policy other weights, to be used and not to be trained; a whole one in this process alone."""
        if self.lent is None:
            self._copy_weights_in(weights)
            return
        with self._asked(_Weights(weights)):
            self._copy_weights_in(weights)

    @torch.no_grad()
    def _copy_weights_in(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._trained.items():
            parameter.copy_(read_like(weights[name], parameter))

    def set_lr(self, scale: float) -> None:
        """Set every learning rate to ``scale`` times what it was at the start."""
        self.train_state.set_lr(scale)

    def state(self) -> dict[str, Any]:
        """Return all that the next update depends on, beside the settings; of shards, names of what is staged."""
        if self.part_writer is None:
            return self._collect_state()
        with self._asked(_STATE):
            return self.part_writer.stage(self._collect_state())

    def _collect_state(self) -> dict[str, Any]:
        """Collect the state of this process; its parts are where they are, and live."""
        return self.train_state.collect() | {
            "packing": None if self.packing.chosen is None else self.packing.chosen.name,
            "affordable_tokens": self.affordable_tokens,
            "world_size": self.process_group.world_size,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state``, in every process.

        Raises:
            UserError: it is another model's, or a process cannot read it.
        """
        with self._asked(state):
            failures = self._try_to_load(state)
        if failed := {rank: why for rank, why in enumerate(failures) if why}:
            raise UserError(f"the checkpoint cannot be read by {describe_ranks(failed)}: {next(iter(failed.values()))}")

    def _try_to_load(self, state: Mapping[str, Any]) -> list[str]:
        """Restore a state, as every process does; return what went wrong with its files in each of them."""
        why = ""
        try:
            self._load(state)
        except (OSError, ValueError) as error:
            if self.process_group.world_size == 1 and isinstance(error, ValueError):
                raise  # nobody waits for this process
            why = str(error)
        return self.process_group.all_gather(why)

    def _load(self, state: Mapping[str, Any]) -> None:
        self.train_state.load(state)
        if self.shards is not None and self._keeps_whole:
            self.load_weights(state["policy"])
        if state["packing"] is not None:  # not proven again: other rows might show something else
            self.packing.chosen = PACKINGS[state["packing"]]
        if state.get("world_size") == self.process_group.world_size:  # else each has another part, and other room
            self.affordable_tokens = state.get("affordable_tokens")  # counted again, sums might be rounded otherwise

    def run_worker(self) -> None:
        """Run every update that rank 0 broadcasts, until it broadcasts None."""
        while (message := self.process_group.receive()) is not None:
            with self.process_group.taking_part():
                self._follow(message)
        if self.part_writer is not None:
            self.part_writer.close()

    def _follow(self, message: Any) -> None:
        """Take part in one thing that rank 0 asks for."""
        if isinstance(message, dict):
            self._try_to_load(message)
        elif isinstance(message, _Weights):
            self._copy_weights_in(message.values)
        elif isinstance(message, _Measured):
            self._measure_token(PACKINGS[message.packing], message.rows)
        elif message == _RESET:
            self.train_state.forget()
        elif message == _STATE:
            assert self.part_writer is not None
            self.part_writer.stage(self._collect_state())
        elif message == _COPY:
            self._gather_trained()
        elif isinstance(message, Errand) or message in (WRITE, GATHER):
            assert self.lent is not None
            self.lent.take_part(message)
        else:
            settings, lrs, packing, outlines = message
            self.settings = LossSettings(**settings)
            self.train_state.set_lrs(lrs)
            shares = receive_rows(self.process_group, len(outlines))
            with self.train_state.onloaded(), self._passes.prepared(self.settings):
                self._run_steps(PACKINGS[packing], outlines, shares)

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
        forwarded_rows = [RowArrays.read(rows[i]) for i in forwarded]
        forwarded_weights = [weights[i] for i in forwarded]
        numbers = [updates[i] if updates else 0 for i in forwarded]
        packing = self._choose_packing(forwarded_rows)  # rank 0 decides for all
        settings = {f.name: getattr(s, f.name) for f in fields(s)}  # as they are now: a stage has its own
        settings["max_tokens_per_microbatch"] = self._choose_max_tokens(packing, forwarded_rows)
        plan = [self._plan(packing, *own) for own in cut_batch(forwarded_rows, forwarded_weights, numbers)]
        outlines = [outline_update(batches) for batches in plan]
        with self._asked((settings, self.train_state.lrs, packing.name, outlines)):
            shares = scatter_rows(self.process_group, plan)
            with self.train_state.onloaded(), self._passes.prepared(self.settings):
                metrics, gathered = self._run_steps(packing, outlines, shares)
        learned = unshard(self.process_group, plan, gathered)
        ordered = order_by_row(forwarded_rows, [batch for batches in plan for batch in batches], learned)
        for i, values in zip(forwarded, ordered, strict=True):
            self.learned[i] = values
        return counts | metrics

    def _plan(self, packing: Packing, rows: Sequence[RowArrays], weights: Sequence[float]) -> list[MicroBatch]:
        """Pack the rows of an optimizer step into micro-batches, in the order in which they are dealt to processes."""
        batches = packing.pack(rows, weights, self._choose_max_tokens(packing, rows))
        if self.shards is not None:  # those of a round wait for each other
            batches.sort(key=estimate_cost, reverse=True)
        return batches

    def _run_steps(
        self, packing: Packing, outlines: Sequence[UpdateOutline], shares: Sequence[Sequence[MicroBatch]]
    ) -> tuple[dict[str, float], list[Tensor]]:
        """Make the optimizer steps of a batch, on this process's shares of them.

        Returns:
            The metrics; and, in rank 0, of each process ``learned`` of its trained tokens, (trained, 3).
        """
        s = self.settings
        torch.set_num_threads(s.threads or os.cpu_count() or 1)  # the engine may want fewer
        updates = [self._prepare(packing, *own) for own in zip(outlines, shares, strict=True)]
        for update in updates[1:]:  # the policy before the first one is the old one of all
            self._passes.compute_old_logprobs(packing, update)
        metrics, grad_norms = LossMetrics(), []
        total: Tensor | float = 0.0
        for _ in range(s.num_iterations):
            for update in updates:
                for batch, state in update.shard:
                    with self._passes.differentiated(packing, batch) as replayed:
                        loss, batch_metrics = self._compute_loss(packing, batch, state, update)
                        loss.backward()  # type: ignore[no-untyped-call]
                    state.keep_gradients()
                    if replayed is not None:
                        replayed.record(batch_metrics)
                    metrics.add(batch_metrics)
                    total = loss.detach().double() + total  # on the device: nobody waits for it
                self._passes.idle(packing, update, backward=True)
                grad_norms.append(self._step_optimizers())
        self._publish()
        learned = [state.learned() for update in updates for _, state in update.shard]
        by_process = self.process_group.gather(torch.cat([torch.empty(0, 3), *learned]))
        gathered = self.process_group.all_gather((float(total), metrics.totals()))
        step = {"loss": sum(loss for loss, _ in gathered) / len(grad_norms), "grad_norm": fmean(grad_norms)}
        return combine_metrics([totals for _, totals in gathered]) | step, by_process

    def _prepare(self, packing: Packing, outline: UpdateOutline, batches: Sequence[MicroBatch]) -> Update:
        """Compute what stays the same over all iterations of an optimizer step."""
        shard = [(batch, MicroBatchState()) for batch in batches]
        rounds = -(-outline.micro_batches // self.process_group.world_size)
        idle = rounds - len(shard) if self.shards is not None else 0
        bonus_tokens = float(outline.trained_tokens)
        update = Update(shard, bonus_tokens, outline.tokens, idle, outline.idle_token)
        own = self.train_state
        if own.reference is not None and self.settings.beta:
            self._passes.compute_ref_logprobs(packing, update, own.parameters, own.reference)
        if self.settings.top_entropy_quantile < 1.0:
            bonus_tokens = self._passes.mark_high_entropy(packing, update)
        return replace(update, bonus_tokens=bonus_tokens)

    @torch.no_grad()
    def _publish(self) -> None:
        """Let the whole policy of rank 0 follow the shards."""
        if self.shards is None or self.lent is not None:
            return
        whole = self._trained
        for name, values in self.shards.gather():
            if values is not None:
                whole[name].copy_(values)

    def _step_optimizers(self) -> float:
        """Sum the gradients over all processes, and step; return their norm before clipping."""
        if self.shards is None:
            self.process_group.all_reduce_gradients(self.policy.parameters())
        grad_norm = self.train_state.step(self.settings.max_grad_norm)
        every = self.settings.ref_sync_steps
        if every and isfinite(grad_norm) and self.version % every == 0:
            self.train_state.mix_reference(self.settings.ref_mixup_alpha)
        return grad_norm

    def _choose_packing(self, rows: Sequence[RowArrays]) -> Packing:
        """Choose shared prefixes if it is proven that this model gives the same numbers then."""
        if self.packing.chosen is None and sum(len(row.starts) for row in rows) > 1:
            self.packing.prove(self.policy)
        return self.packing.chosen or self.packing.plain

    def _choose_max_tokens(self, packing: Packing, rows: Sequence[RowArrays]) -> int:
        """Return the tokens of a micro-batch: those of the settings, or as many as the memory has room for.

        They are counted once, on the first rows: a limit that changed with what is free would change what is rounded.
        """
        if (given := self.settings.max_tokens_per_microbatch) is not None:
            return given
        if self.affordable_tokens is None:
            policy, trained = unwrap_model(self.policy), [read_local(p) for p in self.train_state.parameters.values()]
            shortest = sorted(rows, key=lambda row: len(row.token_ids))[:2]
            with nullcontext() if self.lent is None else self._asked(_Measured(packing.name, shortest)):
                per_token = self._measure_token(packing, shortest)
            if layers := self._passes.checkpointed:  # each keeps its input; one at a time has all
                inputs = len(layers) * policy.config.get_text_config().hidden_size * policy.dtype.itemsize
                per_token = per_token / len(layers) + inputs
            total, free = read_memory(policy.device if self.shards is None else self.shards.device)
            if self.shards is None or not self.shards.is_offloaded:
                free -= estimate_owed_bytes(self.optimizers, trained)
            offload = self.train_state.offload
            free -= 0 if offload is None else offload.bytes_away
            self.affordable_tokens = count_affordable_tokens(per_token, total, free, self.process_group.local_size)
        return self.affordable_tokens

    def _measure_token(self, packing: Packing, rows: Sequence[RowArrays]) -> float:
        """Measure the bytes that a pass keeps of a token, by some rows; of shards, every process takes part."""
        policy = unwrap_model(self.policy)
        (batch, *_) = packing.pack(rows, [1.0] * len(rows), FEWEST)
        tokens = len(batch.forest.token_ids) if packing is PREFIX else sum(map(len, batch.contexts))

        def run() -> Tensor:
            return packing.compute_states(self.policy, batch)

        with packing.context(policy):
            if self.lent is None or self.shards is None:
                return measure_kept_bytes(policy, run) / tokens
            kept = measure_kept_bytes(policy, partial(self.shards, run))
            self.shards.let_go()
            return kept / tokens

    def _compute_loss(
        self, packing: Packing, batch: MicroBatch, state: MicroBatchState, update: Update
    ) -> tuple[Tensor, LossMetrics]:
        """Compute a micro-batch's share of the step's loss. The entropy bonus is a mean over the step's tokens."""
        s = self.settings
        none: AbstractContextManager[list[Tensor]] = nullcontext([])
        with none if self._balance is None else self._balance.record(self.train_state.policy) as router_logits:
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
