"""Optimizers, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import UserError
from agentrl.learner.muon import Muon

INSTALL = 'needs bitsandbytes: pip install "agentrl-gym[quant]"'
Made = list[torch.optim.Optimizer]


def make_optimizers(policy: nn.Module, name: str, lr: float, weight_decay: float = 0.0) -> Made:
    """Of the parameters that are trained. Raises UserError where the optimizer's library is not installed.

    Parameters of half precision are kept in single precision beside it, where a small step is not rounded away: of a
    weight of 1, bfloat16 knows no change under 0.004.
    """
    masters = {p: p.detach().float().requires_grad_() for p in _trained(policy).values() if p.itemsize < 4}
    made = OPTIMIZERS[name](policy, lr=lr, weight_decay=weight_decay)
    for optimizer in made if masters else ():
        _keep_in_full(optimizer, masters)
    return made


def _keep_in_full(optimizer: torch.optim.Optimizer, masters: dict[nn.Parameter, Tensor]) -> None:
    """The optimizer steps the masters, between two hooks that bring them the gradients, and take back what they are."""
    pairs: list[tuple[nn.Parameter, Tensor]] = []
    for group in optimizer.param_groups:
        pairs += [(p, masters[p]) for p in group["params"] if p in masters]
        group["params"] = [masters.get(p, p) for p in group["params"]]

    def bring(*_: Any) -> None:
        for parameter, master in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()

    @torch.no_grad()
    def take(*_: Any) -> None:
        for parameter, master in pairs:
            parameter.copy_(master)
            parameter.grad = master.grad = None

    optimizer.register_step_pre_hook(bring)
    optimizer.register_step_post_hook(take)


def adamw(policy: nn.Module, **settings: Any) -> Made:
    return [torch.optim.AdamW(_trained(policy).values(), **settings)]


def adamw_8bit(policy: nn.Module, **settings: Any) -> Made:
    """State in 8 bits, a quarter of AdamW's (arXiv 2110.02861); tensors under 4096 elements keep theirs in full."""
    try:
        import bitsandbytes
    except ImportError:
        raise UserError(f"learner.optimizer adamw_8bit {INSTALL}") from None
    return [bitsandbytes.optim.AdamW8bit(list(_trained(policy).values()), **settings)]


def muon(policy: nn.Module, **settings: Any) -> Made:
    """For the hidden matrices; AdamW for embeddings, norms and heads.

    Muon orthogonalises the update of a matrix (Jordan et al. 2024); scaled to AdamW's root mean square
    (arXiv 2502.16982), both can share one learning rate.
    """
    named = _trained(policy)
    tables = {id(m.weight) for m in policy.modules() if isinstance(m, nn.Embedding)}
    tables |= {id(p) for n, p in named.items() if "lm_head" in n}
    matrices = [p for p in named.values() if p.ndim == 2 and id(p) not in tables]
    rest = [p for p in named.values() if p.ndim != 2 or id(p) in tables]
    made: list[tuple[Callable[..., torch.optim.Optimizer], list[nn.Parameter]]] = [
        (Muon, matrices),
        (torch.optim.AdamW, rest),
    ]
    return [kind(parameters, **settings) for kind, parameters in made if parameters]


def _trained(policy: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in policy.named_parameters() if p.requires_grad}


OPTIMIZERS: dict[str, Callable[..., Made]] = {"adamw": adamw, "adamw_8bit": adamw_8bit, "muon": muon}
