"""Muon: momentum made orthogonal, for the matrices of a network (Jordan et al. 2024).

The same update as torch.optim.Muon with adjust_lr_fn="match_rms_adamw", so that learning rates are of AdamW's
size. Matrices of one shape are orthogonalised together and in their own precision: on a CPU that is ten times
as fast as torch's loop in bfloat16.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315  # a quintic that drives singular values towards 1
_STEPS = 5


class Muon(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        if any(p.ndim != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("Muon updates matrices; give vectors and embeddings to another optimizer")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[torch.Size, torch.device], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault((p.shape, p.device), []).append(p)
            for params in by_shape.values():
                self._update(params, group)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        lookahead = torch.stack([self._momentum(p, group["momentum"]) for p in params])  # [n, rows, columns]
        scale = group["lr"] * 0.2 * max(params[0].shape) ** 0.5
        for p, direction in zip(params, orthogonal(lookahead), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-scale)

    def _momentum(self, p: Tensor, momentum: float) -> Tensor:
        assert p.grad is not None
        buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        buffer.lerp_(p.grad, 1 - momentum)
        ahead: Tensor = p.grad.lerp(buffer, momentum)  # Nesterov
        return ahead


def orthogonal(matrices: Tensor) -> Tensor:
    """Close to U V^T of each matrix U S V^T, by Newton-Schulz iteration. [n, rows, columns]"""
    tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x
