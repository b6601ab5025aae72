"""Muon: momentum whose every matrix is orthogonalised before it is applied (Jordan et al. 2024).

``torch.optim.Muon`` iterates in bfloat16, matrix after matrix, which on a CPU costs more than the backward pass of a
small model. Here matrices of one shape go through the iteration together, in float32 there. Of matrices in shards each
process orthogonalises the whole, and keeps its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.learner.sharding import cut_like, gather_tensor

# A quintic whose iteration moves every singular value near 1, chosen for speed at 0 (Jordan et al. 2024).
A, B, C = 3.4445, -4.7750, 2.0315


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices: (n, rows, columns) to the same."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = A * x + torch.baddbmm(B * gram, gram, gram, alpha=C) @ x
    orthogonal: Tensor = x if wide else x.mT
    return orthogonal.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """An optimizer for hidden matrices.

    Its update has the root mean square of AdamW's (arXiv 2502.16982), so learning rates can be shared.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append((p, self._momentum(p, p.grad, group["momentum"])))
            for shape, pairs in shapes.items():
                updates = orthogonalize(torch.stack([gather_tensor(update) for _, update in pairs]))
                scale = 0.2 * max(shape) ** 0.5
                for (p, _), whole in zip(pairs, updates, strict=True):
                    update = cut_like(whole, p) if isinstance(p, DTensor) else whole
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, p: Tensor, grad: Tensor, momentum: float) -> Tensor:
        """Update the running mean of gradients; return Nesterov's look-ahead of it."""
        buffer: Tensor = self.state[p].setdefault("momentum", torch.zeros_like(p))
        buffer.lerp_(grad, 1 - momentum)
        return grad.lerp(buffer, momentum)
