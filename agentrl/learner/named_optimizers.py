"""The optimizers by name: each is declared with `agentrl.optimizer`, which makes it a name of ``learner.optimizer``.

One is called with the policy and the learning rate, and returns an optimizer over the policy's trained parameters, or a
list of them where parameters are of different kinds. The parameters of an optimizer are settings: ``weight_decay``, and
``learner.optimizer_args``. This module loads torch when one is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field

from agentrl.errors import UserError
from agentrl.settings.entries import optimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

INSTALL = 'needs bitsandbytes: pip install "agentrl-gym[quant]"'


def _check_betas(betas: tuple[float, float]) -> tuple[float, float]:
    if wrong := [b for b in betas if not 0 <= b < 1]:
        raise ValueError(f"betas are two numbers from 0 to below 1, not {wrong[0]}")
    return betas


Decay = Annotated[float, Field(ge=0)]
Betas = Annotated[tuple[float, float], AfterValidator(_check_betas)]
Epsilon = Annotated[float, Field(gt=0)]


@optimizer(explain="AdamW, weight decay {weight_decay}")
def adamw(
    policy: nn.Module,
    lr: float,
    *,
    weight_decay: Decay = 0.0,
    betas: Betas = (0.9, 0.999),
    adam_epsilon: Epsilon = 1e-8,
) -> list[Optimizer]:
    """AdamW (arXiv 1711.05101).

    Args:
        weight_decay: of the weights, a step.
        betas: of AdamW's two running means.
        adam_epsilon: added to the denominator of AdamW's step.
    """
    parameters = list(list_trained(policy).values())
    return [build_adamw(parameters, lr=lr, weight_decay=weight_decay, betas=betas, eps=adam_epsilon)]


@optimizer(explain="AdamW with its state in 8 bits, weight decay {weight_decay}")
def adamw_8bit(
    policy: nn.Module,
    lr: float,
    *,
    weight_decay: Decay = 0.0,
    betas: Betas = (0.9, 0.999),
    adam_epsilon: Epsilon = 1e-8,
) -> list[Optimizer]:
    """AdamW with its state in 8 bits, a quarter of the memory (arXiv 2110.02861); of tensors under 4096 in full.

    Args:
        weight_decay: of the weights, a step.
        betas: of AdamW's two running means.
        adam_epsilon: added to the denominator of AdamW's step.
    """
    try:
        import bitsandbytes
    except ImportError:
        raise UserError(f"learner.optimizer adamw_8bit {INSTALL}") from None
    made = bitsandbytes.optim.AdamW8bit(
        list(list_trained(policy).values()), lr=lr, weight_decay=weight_decay, betas=betas, eps=adam_epsilon
    )
    return [made]


@optimizer(explain="Muon for the hidden matrices, AdamW for the rest, weight decay {weight_decay}")
def muon(
    policy: nn.Module,
    lr: float,
    *,
    weight_decay: Decay = 0.0,
    betas: Betas = (0.9, 0.999),
    adam_epsilon: Epsilon = 1e-8,
) -> list[Optimizer]:
    """Muon for the hidden matrices, AdamW for embeddings, norms and heads.

    Muon orthogonalises the update of a matrix (Jordan et al. 2024); scaled to AdamW's root mean square
    (arXiv 2502.16982), both can share one learning rate.

    Args:
        weight_decay: of the weights, a step.
        betas: of AdamW's two running means.
        adam_epsilon: added to the denominator of AdamW's step.
    """
    from torch import nn

    from agentrl.learner.muon import Muon

    named = list_trained(policy)
    tables = {id(m.weight) for m in policy.modules() if isinstance(m, nn.Embedding)}
    tables |= {id(p) for n, p in named.items() if "lm_head" in n}
    matrices = [p for p in named.values() if p.ndim == 2 and id(p) not in tables]
    rest = [p for p in named.values() if p.ndim != 2 or id(p) in tables]
    optimizers: list[Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, lr=lr, weight_decay=weight_decay))
    if rest:
        optimizers.append(build_adamw(rest, lr=lr, weight_decay=weight_decay, betas=betas, eps=adam_epsilon))
    return optimizers


def build_adamw(parameters: list[nn.Parameter], **settings: Any) -> Optimizer:
    """Build AdamW, fused where torch has it for the parameters' devices: it makes no copies beside its state."""
    from torch.optim import AdamW

    fused = {p.device.type for p in parameters} <= {"cpu", "cuda"}
    return AdamW(parameters, **settings, fused=fused)


def list_trained(policy: nn.Module) -> dict[str, nn.Parameter]:
    """List the parameters that are trained, by name."""
    return {n: p for n, p in policy.named_parameters() if p.requires_grad}
