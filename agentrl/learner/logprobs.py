"""Logprobs of the tokens that are trained, and of no others: the vocabulary's width is paid only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl.errors import UserError
from agentrl.models.capabilities import NotProven, inner_model

CHUNK = 4096  # trained positions whose logits exist at once


def causal_lm(model: Any) -> Any:
    """The transformers model itself, adapters left in, where ``model`` is PEFT's wrapper around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def output_head(model: Any) -> Callable[[Tensor], Tensor]:
    """Hidden states to logits, as the model's own forward pass does it, its scaling and soft-capping included.

    Raises:
        UserError: the model does something else to its logits (found by comparing on a few tokens), or has no such
            head.
    """
    model = causal_lm(model)
    name = type(model).__name__
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)

    def logits(hidden: Tensor) -> Tensor:
        out: Tensor = head(hidden) * scale if scale != 1.0 else head(hidden)
        return out if cap is None else cap * torch.tanh(out / cap)

    try:
        if head is None or not _agrees(model, logits):
            raise NotProven("it does more to its logits than its output layer, a scale and a soft cap")
    except Exception as error:  # a model's own code, which may want more than tokens
        why = str(error) if isinstance(error, NotProven) else f"its own code raises {type(error).__name__}: {error}"
        raise UserError(
            f"agentrl cannot train {name}, nor sample from it: {why.splitlines()[0]}; "
            "docs/models.md lists the models that can"
        ) from None
    return logits


@torch.no_grad()
def _agrees(model: Any, logits: Callable[[Tensor], Tensor]) -> bool:
    """One pass over four tokens: the hidden states are caught on their way, so that dropout does not matter."""
    states: list[Tensor] = []
    device = next(model.parameters()).device
    hook = inner_model(model).register_forward_hook(lambda *call: states.append(call[2].last_hidden_state))
    try:
        ids = torch.arange(4, device=device)[None] % model.config.get_text_config().vocab_size
        expected = model(input_ids=ids, use_cache=False).logits.float()
    finally:
        hook.remove()
    found = logits(states[0]).float()
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-3)


def token_logprobs(
    head: Callable[[Tensor], Tensor],
    states: Tensor,  # (trained, width): each predicts the target beside it
    targets: Tensor,  # (trained,)
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies, (trained,) each; the entropies without a gradient, unless it is asked for."""

    def score(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states).float() / temperature
        logprobs = logits.log_softmax(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, wanted[:, None])[:, 0], entropy

    if len(states) <= CHUNK:
        return score(states, targets)
    # Several chunks: each one's logits are computed again in the backward pass instead of kept.
    parts = [
        checkpoint(score, s, t, use_reentrant=False)
        for s, t in zip(torch.split(states, CHUNK), torch.split(targets, CHUNK), strict=True)
    ]
    return torch.cat([p for p, _ in parts]), torch.cat([e for _, e in parts])
