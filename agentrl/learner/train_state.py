"""The state that an update changes: trained parameters, what their optimizers hold, the reference, the version.

In several processes each has its part of all this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agentrl.errors import UserError
from agentrl.learner.optimizer_offload import OptimizerOffload
from agentrl.learner.sharded_state import list_stepped, load_optimizer, pair_masters, read_like
from agentrl.learner.sharding import gather_tensor

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class TrainState:
    """The state of a training that is stepped; ``version`` counts the updates.

    Args:
        policy: whole, or in shards.
        is_cut: it is in shards.
        has_reference: a copy of the parameters is kept, as they are now.
        is_offloaded: what the optimizers hold is on the CPU, but inside ``onloaded``.
    """

    def __init__(
        self,
        policy: PreTrainedModel | PeftModel,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        is_cut: bool = False,
        has_reference: bool = False,
        is_offloaded: bool = False,
    ) -> None:
        self.policy, self.optimizers, self.version = policy, list(optimizers), 0
        self._is_cut, self._base_lrs = is_cut, self.lrs
        own = self.parameters if has_reference else {}
        self.reference = {n: p.detach().clone() for n, p in own.items()} if has_reference else None
        self.offload = OptimizerOffload(policy, self.optimizers) if is_offloaded else None
        if self.offload is not None:
            self.offload.offload()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """List the parameters that the optimizers step, by name."""
        return {n: p for n, p in self.policy.named_parameters() if p.requires_grad}

    @property
    def lrs(self) -> list[list[float]]:
        """Return the learning rates: of each optimizer those of its groups."""
        return [[float(g["lr"]) for g in o.param_groups] for o in self.optimizers]

    def set_lr(self, scale: float) -> None:
        """Set every learning rate to ``scale`` times what it was at the start."""
        self.set_lrs([[lr * scale for lr in lrs] for lrs in self._base_lrs])

    def set_lrs(self, lrs: Sequence[Sequence[float]]) -> None:
        """Set the learning rates: of each optimizer those of its groups."""
        for optimizer, own in zip(self.optimizers, lrs, strict=True):
            for group, lr in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = lr

    def forget(self) -> None:
        """Let the optimizers forget their running means."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def onloaded(self) -> AbstractContextManager[None]:
        """Have what the optimizers hold on the policy's device until the block ends."""
        return nullcontext() if self.offload is None else self.offload.onloaded()

    def step(self, max_grad_norm: float) -> float:
        """Clip the gradients, and step; return their norm before clipping.

        If it is not finite, nothing is changed: a NaN in the policy cannot be taken back.
        """
        parameters = [p for p in self.policy.parameters() if p.grad is not None]
        grad_norm = float(gather_tensor(nn.utils.clip_grad_norm_(parameters, max_grad_norm)))
        for optimizer in self.optimizers:
            if isfinite(grad_norm):
                optimizer.step()
        self.policy.zero_grad(set_to_none=True)
        self.version += isfinite(grad_norm)
        return grad_norm

    @torch.no_grad()
    def mix_reference(self, alpha: float) -> None:
        """Move the reference towards the policy: by all of the way where ``alpha`` is 1."""
        if self.reference is not None:
            own = self.parameters
            self.reference = {n: r.mul(1.0 - alpha).add(own[n], alpha=alpha) for n, r in self.reference.items()}

    def collect(self) -> dict[str, Any]:
        """Collect all of it; the parts of a policy in shards are where they are, and live."""
        names: dict[Tensor, str] = {p: n for n, p in self.parameters.items()}
        return {
            "policy": {n: self._read(p) for n, p in self.parameters.items()},
            "optimizers": [o.state_dict() for o in self.optimizers],
            "optimizer_names": self._optimizer_names,
            "masters": [self._read(p) for p in self.list_masters()],
            "reference": None if self.reference is None else {n: self._read(t) for n, t in self.reference.items()},
            "version": self.version,
            **({"stepped": [names.get(p) for p in list_stepped(self.optimizers)]} if self._is_cut else {}),
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what was collected.

        Raises:
            UserError: it is another model's, or another optimizer's.
        """
        trained, saved = self.parameters, state["policy"]
        if trained.keys() != saved.keys() or any(trained[n].shape != saved[n].shape for n in trained):
            raise UserError("the checkpoint is of another model, or of another adapter")
        if self._optimizer_names != state["optimizer_names"]:
            raise UserError(
                f"the checkpoint has the state of {' and '.join(state['optimizer_names'])}, and this run steps "
                f"{' and '.join(self._optimizer_names)}: resume with the same learner.optimizer, or optimizers="
            )
        for name, parameter in trained.items():
            parameter.copy_(read_like(saved[name], parameter))
        with self.onloaded():
            for optimizer, optimizer_state in zip(self.optimizers, state["optimizers"], strict=True):
                load_optimizer(optimizer, optimizer_state)
            names = {p: n for n, p in trained.items()}
            for own, values in pair_masters(list_stepped(self.optimizers), names, state):
                own.copy_(read_like(values, own))
        if state["reference"] is not None and self.reference is not None:
            for name, reference in self.reference.items():
                reference.copy_(read_like(state["reference"][name], reference))
        self.version = state["version"]

    @property
    def _optimizer_names(self) -> list[str]:
        return [type(o).__name__ for o in self.optimizers]

    def list_masters(self) -> list[Tensor]:
        """List the single-precision copies that the optimizers step instead of the policy's own parameters."""
        policy = set(self.policy.parameters())
        return [p for p in list_stepped(self.optimizers) if p not in policy]

    def _read(self, tensor: Tensor) -> Tensor:
        return tensor.detach() if self._is_cut else tensor.detach().cpu()
