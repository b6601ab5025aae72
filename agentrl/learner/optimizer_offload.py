"""Tensors of the optimizers, moved to the CPU while the engine samples on the same GPU.

Running means, and the single-precision copies of half-precision weights, are 12 of the 14 bytes a parameter that a
full training of bfloat16 weights keeps. Nobody needs them until the next update.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Move = Callable[[Tensor], Tensor]


def move_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, into pinned memory: the way back is quick."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


class OptimizerOffload:
    """Moves the tensors that optimizers have beside the policy's own.

    Args:
        home: where the optimizers step, the policy's device by default.
        move_out, move_in: how a tensor leaves its device, and how it comes back.
    """

    def __init__(
        self,
        policy: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        move_out: Move = move_to_host,
        move_in: Move | None = None,
    ) -> None:
        self._policy, self._optimizers = set(policy.parameters()), list(optimizers)
        self._home = next(policy.parameters()).device
        self._move_out, self._move_in = move_out, move_in or (lambda tensor: tensor.to(self._home))
        self._away: list[weakref.ref[Tensor]] = []  # weak: a state that is forgotten does not come back

    @property
    def bytes_away(self) -> int:
        """Count the bytes that are on the CPU, and will come back."""
        return sum(t.nbytes for ref in self._away if (t := ref()) is not None)

    def offload(self) -> None:
        """Move them to the CPU; those that are there stay."""
        for tensor in self._list_tensors():
            tensor.data = self._move_out(tensor.data)
            self._away.append(weakref.ref(tensor))

    def onload(self) -> None:
        """Move back what was moved."""
        for ref in self._away:
            if (tensor := ref()) is not None:
                tensor.data = self._move_in(tensor.data)
        self._away.clear()

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        """Have them on their device until the block ends."""
        self.onload()
        try:
            yield
        finally:
            self.offload()

    def _list_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors on the policy's device that are not away: masters and states, each once."""
        away = {id(t) for ref in self._away if (t := ref()) is not None}
        for optimizer in self._optimizers:
            masters = [p for group in optimizer.param_groups for p in group["params"] if p not in self._policy]
            states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
            for tensor in (*masters, *states):
                local = getattr(tensor, "_local_tensor", tensor)  # a sharded tensor's part of this process
                if local.device == self._home and local.numel() and local.dim() and id(local) not in away:
                    yield local
