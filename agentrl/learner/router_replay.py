"""Router replay (Rollout Routing Replay, arXiv 2510.11370): a mixture of experts learns by the experts it sampled with.

An engine and a learner round differently, and where two experts are nearly as good a token goes to one here and to
another there: the probabilities of that token differ far more than by rounding. So a token that an engine has passed is
sent to the experts that the engine's routers chose. Their weights are the learner's own, of its own router's scores at
them: the gate is trained. A token of which no engine says its experts takes the learner's choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrl.errors import UserError
from agentrl.learner.packing import MicroBatch
from agentrl.learner.router_balance import count_rows
from agentrl.learner.row_arrays import Int64
from agentrl.models.device_copy import copy_to_device
from agentrl.models.lm_head import unwrap_model
from agentrl.models.routers import Routers, find_routers, refuse_replay

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from agentrl.learner.losses.objective import LossMetrics


@dataclass(frozen=True)
class RouterReplay:
    """The replay of a policy's routers."""

    routers: Routers

    @classmethod
    def find(cls, policy: PreTrainedModel | PeftModel) -> RouterReplay:
        """Find a policy's routers.

        Raises:
            UserError: it has none, or they cannot be replayed; the sentence says why.
        """
        model = unwrap_model(policy)
        with refuse_replay(f"the experts of {type(model).__name__} cannot be replayed"):
            return cls(find_routers(model))

    @contextmanager
    def replay(
        self, policy: PreTrainedModel | PeftModel, batch: MicroBatch, *, shares_prefixes: bool
    ) -> Iterator[BatchReplay]:
        """Let the passes of a micro-batch in this block take the experts that its rows bring.

        Raises:
            UserError: they are not those of this policy, or a router does not choose as it was found to.
        """
        model = unwrap_model(policy)
        known, chosen = self._scatter_experts(batch, shares_prefixes=shares_prefixes)
        device = next(model.parameters()).device
        counts = count_rows(batch, shares_prefixes=shares_prefixes)
        known, chosen, counts = (copy_to_device(t, device) for t in (known, chosen, counts))
        replayed = BatchReplay(known, chosen, counts)
        with refuse_replay(type(model).__name__), self.routers.choose(model, replayed.choose):
            yield replayed

    def _scatter_experts(self, batch: MicroBatch, *, shares_prefixes: bool) -> tuple[Tensor, Tensor]:
        """Scatter rows' experts to where their tokens stand in a pass: (positions,), (positions, layers, top_k)."""
        index = _index_tokens(batch, shares_prefixes=shares_prefixes)
        size = len(batch.forest.token_ids) if shares_prefixes else len(batch.contexts) * max(map(len, batch.contexts))
        layers, top_k = len(self.routers.names), self.routers.top_k
        wide = any(row.experts is not None and row.experts.chosen.itemsize > 1 for row in batch.rows)
        known, chosen = np.zeros(size, np.bool_), np.zeros((size, layers, top_k), np.int32 if wide else np.uint8)
        first = 0
        for row in batch.rows:
            positions = np.concatenate(index[first : first + len(row.starts)])
            first += len(row.starts)
            if row.experts is None:
                continue
            own = row.experts.chosen
            if own.shape[1:] != (layers, top_k) or int(own.max(initial=0)) >= self.routers.experts:
                raise UserError(
                    f"learner.router_replay: the engine says {own.shape[2]} experts of a token in {own.shape[1]} "
                    f"layers, numbers up to {int(own.max(initial=0))}; the policy's {layers} routers choose {top_k} of "
                    f"{self.routers.experts}"
                )
            known[positions[row.experts.known]] = True
            chosen[positions[row.experts.known]] = own
        return torch.from_numpy(known), torch.from_numpy(chosen)


@dataclass
class BatchReplay:
    """The replay in the passes of one micro-batch.

    Args:
        known: the positions whose experts are known, (positions,).
        chosen: the experts, (positions, layers, top_k).
        counts: the rows that each position is of, (positions,).
    """

    known: Tensor
    chosen: Tensor
    counts: Tensor
    _disagreed: dict[int, Tensor] = field(default_factory=dict)  # by router: tokens of rows

    def choose(self, router_index: int, scores: Tensor, own: Tensor) -> Tensor:
        """Choose the experts of one router's tokens, (tokens, top_k)."""
        extra = len(own) - len(self.known)  # a forest may be padded to whole blocks
        known, chosen = pad(self.known, (0, extra)), pad(self.chosen[:, router_index], (0, 0, 0, extra))
        chosen = torch.where(known[:, None], chosen.to(own.dtype), own)
        if router_index not in self._disagreed:
            differs = (chosen.sort(-1).values != own.sort(-1).values).any(-1)
            self._disagreed[router_index] = (differs[: len(self.counts)] * self.counts).sum()
        return chosen

    def record(self, metrics: LossMetrics) -> None:
        """Record the share of tokens that are replayed, and of those, over all layers, that would go elsewhere."""
        replayed, disagreed = (self.known * self.counts).sum(), torch.stack(list(self._disagreed.values())).sum()
        metrics.sums["router/replayed"] = replayed, self.counts.sum()
        metrics.sums["router/replay_disagreement"] = disagreed, replayed * len(self._disagreed)


def _index_tokens(batch: MicroBatch, *, shares_prefixes: bool) -> list[Int64]:
    """List where the tokens of each context stand in a pass."""
    if shares_prefixes:
        return [positions.astype(np.int64) for positions in batch.forest.token_index]
    longest = max(map(len, batch.contexts))
    return [number * longest + np.arange(len(context)) for number, context in enumerate(batch.contexts)]
