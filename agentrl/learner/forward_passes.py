"""The passes of the policy over the micro-batches of this process, and in step with the other processes.

Where the policy is in shards, a pass gathers it, so every process has to make as many passes as the others: one that
has no micro-batch left takes part with two tokens that count nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.errors import UserError
from agentrl.learner.bf16_products import find_linear_layers, multiply_in_bf16
from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.hidden_states import PREFIX, Packing
from agentrl.learner.logprobs import token_logprobs
from agentrl.learner.losses.losses import entropy_threshold
from agentrl.learner.packing import MicroBatch, make_idle_batch
from agentrl.learner.router_replay import BatchReplay, RouterReplay
from agentrl.learner.sampling_rules import SamplingRules
from agentrl.learner.sharding import ShardedPolicy, read_local
from agentrl.learner.updates import Update
from agentrl.models.device_copy import copy_to_device
from agentrl.models.lm_head import unwrap_model

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from agentrl.learner.learner import LossSettings


class ForwardPasses:
    """Runs the policy that is trained.

    Args:
        policy: the one that is trained: whole, or that of ``shards``.
        lm_head: from its hidden states to logits.
        settings: those of the learner at the beginning; ``settings`` are those of the step.
        router_replay: sends tokens to the experts that an engine sent them to; None: they take the policy's own.
    """

    def __init__(
        self,
        policy: PreTrainedModel | PeftModel,
        lm_head: Callable[[Tensor], Tensor],
        settings: LossSettings,
        process_group: ProcessGroup,
        shards: ShardedPolicy | None,
        router_replay: RouterReplay | None = None,
    ) -> None:
        self.policy, self.settings, self._router_replay = policy, settings, router_replay
        self._lm_head, self._process_group, self._shards = lm_head, process_group, shards
        self.checkpointed = _find_checkpointed_layers(policy) if settings.gradient_checkpointing else []
        self._bf16_layers = find_linear_layers(unwrap_model(policy)) if settings.bf16 else []

    @contextmanager
    def prepared(self, settings: LossSettings) -> Iterator[None]:
        """Run the passes of a step, by its settings, inside."""
        self.settings = settings
        with multiply_in_bf16(self._bf16_layers):
            yield

    def replay_experts(self, packing: Packing, batch: MicroBatch) -> AbstractContextManager[BatchReplay | None]:
        """Return a context manager that routes a micro-batch by its rows' experts, or yields None where it has none."""
        if self._router_replay is None or not batch.has_experts:
            return nullcontext()
        return self._router_replay.replay(self.policy, batch, shares_prefixes=packing is PREFIX)

    @contextmanager
    def differentiated(self, packing: Packing, batch: MicroBatch) -> Iterator[BatchReplay | None]:
        """Let a pass of a micro-batch inside be followed by its backward pass; return what `replay_experts` does.

        With gradient checkpointing layers keep only their inputs for it. transformers would do so in training mode
        alone, in which dropout is on.
        """
        own = [layer.forward for layer in self.checkpointed]
        with packing.context(unwrap_model(self.policy)), self.replay_experts(packing, batch) as replayed:
            for layer, forward in zip(self.checkpointed, own, strict=True):
                layer.forward = partial(checkpoint, forward, use_reentrant=False)
            try:
                yield replayed
            finally:
                for layer, forward in zip(self.checkpointed, own, strict=True):
                    layer.forward = forward

    def compute_logprobs(self, packing: Packing, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Run the policy; return logprobs and entropies of the trained tokens, (trained,) each."""
        if self._shards is None:
            return self._score(packing, batch)
        scores: tuple[Tensor, Tensor] = self._shards(partial(self._score, packing, batch))
        return scores

    def _score(self, packing: Packing, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        states, s = packing.compute_states(self.policy, batch), self.settings
        targets, has_bonus = copy_to_device(batch.targets, states.device), bool(s.entropy_coef)
        rules = None
        if s.repetition_penalty != 1.0 or not batch.keeps_all:
            rules = SamplingRules(batch, s.repetition_penalty)
        return token_logprobs(
            *(self._lm_head, states, targets, s.temperature),
            rules=rules,
            entropy_gradient=has_bonus,
            gradient_dtype=torch.bfloat16 if self._bf16_layers else None,
        )

    @torch.no_grad()
    def compute_old_logprobs(self, packing: Packing, update: Update) -> None:
        """Compute the old logprobs of an optimizer step whose policy is not the old one any more."""
        if self.settings.top_entropy_quantile < 1.0:
            return  # they came with the entropies
        for batch, state in update.shard:
            with self.replay_experts(packing, batch):
                state.old_logprobs = self.compute_logprobs(packing, batch)[0]
        self.idle(packing, update)

    @torch.no_grad()
    def compute_ref_logprobs(
        self, packing: Packing, update: Update, parameters: Mapping[str, nn.Parameter], reference: Mapping[str, Tensor]
    ) -> None:
        """Compute the logprobs of the reference, whose ``parameters`` have other values. It chooses its own experts."""
        with swap_values(parameters, reference):
            for batch, state in update.shard:
                state.ref_logprobs = self.compute_logprobs(packing, batch)[0]
            self.idle(packing, update)

    @torch.no_grad()
    def mark_high_entropy(self, packing: Packing, update: Update) -> float:
        """Mark the step's tokens of the highest entropy; return how many there are. The threshold is that of all."""
        for batch, state in update.shard:
            with self.replay_experts(packing, batch):
                state.old_logprobs, state.high_entropy_mask = self.compute_logprobs(packing, batch)
        self.idle(packing, update)
        entropies = [s.high_entropy_mask.cpu() for _, s in update.shard if s.high_entropy_mask is not None]
        threshold = self._find_threshold(torch.cat([torch.empty(0), *(e.float() for e in entropies)]))
        for (_, state), entropy in zip(update.shard, entropies, strict=True):
            state.high_entropy_mask = (entropy >= threshold).to(state.high_entropy_mask)
        marked = float(sum((e >= threshold).sum() for e in entropies))
        return sum(self._process_group.all_gather(marked))

    def _find_threshold(self, entropies: Tensor) -> float:
        """Find the threshold of all processes' entropies, in rank 0, and tell it to the others."""
        gathered = self._process_group.gather(entropies)
        if self._process_group.is_worker:
            return float(self._process_group.receive())
        threshold = float(entropy_threshold(torch.cat(gathered), self.settings.top_entropy_quantile))
        self._process_group.broadcast(threshold)
        return threshold

    def idle(self, packing: Packing, update: Update, *, backward: bool = False) -> None:
        """Take part in the rounds that others have micro-batches for. Without a backward pass that ends the passes."""
        for _ in range(update.idle):
            batch = make_idle_batch(update.idle_token)
            with self.differentiated(packing, batch):
                logp, _ = self.compute_logprobs(packing, batch)
                if backward:
                    (logp.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
        if not backward and self._shards is not None:
            self._shards.let_go()  # what was gathered may be another policy's


def _find_checkpointed_layers(policy: PreTrainedModel | PeftModel) -> list[nn.Module]:
    """Find the layers that can keep only their inputs, and compute the rest again.

    Raises:
        UserError: the model has no such layers.
    """
    model = unwrap_model(policy)
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not (model.supports_gradient_checkpointing and layers):
        raise UserError(f"learner.gradient_checkpointing: {type(model).__name__} does not support it; leave it out")
    return layers


@contextmanager
def swap_values(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Give parameters other values until the block ends; shards in place, which is where they are gathered from."""
    whole = {name: p.data for name, p in parameters.items() if not isinstance(p.data, DTensor)}
    parts = {name: read_local(p.data) for name, p in parameters.items() if name not in whole}
    before = {name: part.clone() for name, part in parts.items()}
    try:
        for name in whole:
            parameters[name].data = values[name]
        for name, part in parts.items():
            part.copy_(read_local(values[name]))
        yield
    finally:
        for name, data in whole.items():
            parameters[name].data = data
        for name, part in parts.items():
            part.copy_(before[name])
