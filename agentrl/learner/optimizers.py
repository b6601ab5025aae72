"""Optimizers over the trained parameters: made by name, or adopted from the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import ContractError, UserError, author_errors
from agentrl.learner.named_optimizers import list_trained
from agentrl.settings.catalogue import BoundEntry, bind_entry

Optimizers = list[torch.optim.Optimizer]
OptimizerSource = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def make_optimizers(policy: nn.Module, name: str, lr: float, **parameters: Any) -> Optimizers:
    """Make the named optimizer, with its ``parameters``, as `build_optimizers`."""
    return build_optimizers(policy, bind_entry("optimizer", name, parameters), lr)


def build_optimizers(policy: nn.Module, bound: BoundEntry, lr: float) -> Optimizers:
    """Make an optimizer over the trained parameters; several where parameters are of different kinds.

    Parameters of half precision are kept in single precision beside it, where a small step is not rounded away: of a
    weight of 1, bfloat16 knows no change under 0.004.

    Raises:
        UserError: the optimizer's library is not installed, or it is not agentrl's own and broke its contract.
    """
    optimizers = _check_optimizers(bound, bound.call_safely(policy, lr), policy)
    _keep_masters(policy, optimizers)
    return optimizers


def _check_optimizers(bound: BoundEntry, made: Any, policy: nn.Module) -> Optimizers:
    """Return the optimizers as a list. Raises ContractError if they are none, or step something else."""
    optimizers = [made] if isinstance(made, torch.optim.Optimizer) else made
    if not isinstance(optimizers, list | tuple) or not all(isinstance(o, torch.optim.Optimizer) for o in optimizers):
        raise ContractError(f"{bound.what} returns a torch.optim.Optimizer, or a list of them, not {made!r:.80}")
    stepped = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    trained = {id(p): name for name, p in list_trained(policy).items()}
    if len(set(map(id, stepped))) < len(stepped):
        raise ContractError(f"{bound.what}: two optimizers step the same parameter")
    if any(id(p) not in trained for p in stepped):
        raise ContractError(f"{bound.what} steps a parameter that is not trained, or none of the policy's")
    if missing := trained.keys() - set(map(id, stepped)):
        first = next(name for key, name in trained.items() if key in missing)
        raise ContractError(
            f"{bound.what} leaves out {len(missing)} trained parameters, such as {first}; freeze what is not to be "
            "trained: parameter.requires_grad_(False)"
        )
    return list(optimizers)


def adopt_optimizer(policy: nn.Module, source: OptimizerSource) -> Optimizers:
    """Return an optimizer of the user's own as a list, as `make_optimizers` does; a factory is called.

    Args:
        source: an optimizer, or a function from the trained parameters to one.

    Raises:
        UserError: it is none, or is not of this policy's parameters.
    """
    trained = list_trained(policy)
    optimizer: object = source
    if callable(source) and not isinstance(source, torch.optim.Optimizer):
        with author_errors("optimizers[0]"):
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
    masters = {p: p.detach().float().requires_grad_() for p in list_trained(policy).values() if p.itemsize < 4}
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
