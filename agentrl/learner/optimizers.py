"""Optimizers, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import UserError
from agentrl.learner.muon import Muon

INSTALL = 'needs bitsandbytes: pip install "agentrl-gym[quant]"'
Optimizers = list[torch.optim.Optimizer]
OptimizerSource = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def make_optimizers(
    policy: nn.Module,
    name: str,
    lr: float,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Optimizers:
    """Make the named optimizer over the trained parameters; several where parameters are of different kinds.

    ``betas`` and ``eps`` are AdamW's, which is a part of each of them.

    Parameters of half precision are kept in single precision beside it, where a small step is not rounded away: of a
    weight of 1, bfloat16 knows no change under 0.004.

    Raises:
        UserError: the optimizer's library is not installed.
    """
    optimizers = OPTIMIZERS[name](policy, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)
    _keep_masters(policy, optimizers)
    return optimizers


def adopt_optimizer(policy: nn.Module, source: OptimizerSource) -> Optimizers:
    """Return an optimizer of the user's own as a list, as `make_optimizers` does; a factory is called.

    Args:
        source: an optimizer, or a function from the trained parameters to one.

    Raises:
        UserError: it is none, or is not of this policy's parameters.
    """
    trained = _list_trained(policy)
    optimizer: object = source
    if callable(source) and not isinstance(source, torch.optim.Optimizer):
        optimizer = source(list(trained.values()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        made = "the function returned" if callable(source) else "not"
        raise UserError(
            f"optimizers[0] is a torch optimizer, or a function of the parameters to one; {made} {optimizer!r:.80}"
        )
    own, known = [p for g in optimizer.param_groups for p in g["params"]], set(trained.values())
    if others := sum(p not in known for p in own):
        raise UserError(
            f"optimizers[0]: {others} of the {len(own)} parameters of this {type(optimizer).__name__} are not trained "
            "here; pass the model it was made for, or a function: "
            f"optimizers=(lambda parameters: {type(optimizer).__name__}(parameters, lr=...), None)"
        )
    if optimizer.state and any(p.itemsize < 4 for p in own):
        raise UserError("optimizers[0] has a state of half precision already; pass a new one, or a function")
    _keep_masters(policy, [optimizer])
    return [optimizer]


def _keep_masters(policy: nn.Module, optimizers: Optimizers) -> None:
    """Let the optimizers step copies in single precision of what is in half precision."""
    masters = {p: p.detach().float().requires_grad_() for p in _list_trained(policy).values() if p.itemsize < 4}
    for optimizer in optimizers if masters else ():
        _step_masters(optimizer, masters)


def _step_masters(optimizer: torch.optim.Optimizer, masters: dict[nn.Parameter, Tensor]) -> None:
    """Let the optimizer step the masters: a hook before copies the gradients to them, one after copies them back."""
    pairs: list[tuple[nn.Parameter, Tensor]] = []
    for group in optimizer.param_groups:
        pairs += [(p, masters[p]) for p in group["params"] if p in masters]
        group["params"] = [masters.get(p, p) for p in group["params"]]

    def copy_gradients(*_: object) -> None:
        for parameter, master in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()

    @torch.no_grad()
    def copy_back(*_: object) -> None:
        for parameter, master in pairs:
            parameter.copy_(master)
            parameter.grad = master.grad = None

    optimizer.register_step_pre_hook(copy_gradients)
    optimizer.register_step_post_hook(copy_back)


def _adamw(policy: nn.Module, **settings: Any) -> Optimizers:
    return [torch.optim.AdamW(_list_trained(policy).values(), **settings)]


def _adamw_8bit(policy: nn.Module, **settings: Any) -> Optimizers:
    """Keep the state in 8 bits, a quarter of AdamW's (arXiv 2110.02861); of tensors under 4096 elements in full."""
    try:
        import bitsandbytes
    except ImportError:
        raise UserError(f"learner.optimizer adamw_8bit {INSTALL}") from None
    return [bitsandbytes.optim.AdamW8bit(list(_list_trained(policy).values()), **settings)]


def _muon(policy: nn.Module, *, betas: tuple[float, float], eps: float, **settings: Any) -> Optimizers:
    """Use Muon for the hidden matrices, AdamW for embeddings, norms and heads.

    Muon orthogonalises the update of a matrix (Jordan et al. 2024); scaled to AdamW's root mean square
    (arXiv 2502.16982), both can share one learning rate.
    """
    named = _list_trained(policy)
    tables = {id(m.weight) for m in policy.modules() if isinstance(m, nn.Embedding)}
    tables |= {id(p) for n, p in named.items() if "lm_head" in n}
    matrices = [p for p in named.values() if p.ndim == 2 and id(p) not in tables]
    rest = [p for p in named.values() if p.ndim != 2 or id(p) in tables]
    kinds: list[tuple[Callable[..., torch.optim.Optimizer], list[nn.Parameter]]] = [
        (Muon, matrices),
        (partial(torch.optim.AdamW, betas=betas, eps=eps), rest),
    ]
    return [kind(parameters, **settings) for kind, parameters in kinds if parameters]


def _list_trained(policy: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in policy.named_parameters() if p.requires_grad}


OPTIMIZERS: dict[str, Callable[..., Optimizers]] = {"adamw": _adamw, "adamw_8bit": _adamw_8bit, "muon": _muon}
