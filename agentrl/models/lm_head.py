"""A causal LM taken apart: the model under PEFT's wrapper, the backbone, and the head from hidden states to logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.errors import UserError

if TYPE_CHECKING:
    from peft import PeftModel


class NotProven(Exception):
    """Another way through the model is not the model's own; the message ends a sentence that names the model."""


def unwrap_model(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the transformers model itself, adapters left in, where ``model`` is PEFT's wrapper around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def replace_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Replace a model's attention by a registered one until the block ends.

    Raises:
        NotProven: the model does not use transformers' attention interface.
    """
    config = model.config.get_text_config()
    before = config._attn_implementation
    try:
        model.set_attn_implementation(name)
        if config._attn_implementation != name:
            raise NotProven("it does not use transformers' attention interface")
        yield
    finally:
        model.set_attn_implementation(before)


def find_backbone(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a causal LM that computes the hidden states its output layer reads.

    Raises:
        NotProven: it has no such part.
    """
    place = locate_backbone(model)
    if place is None:
        raise NotProven("its states cannot be told from its logits")
    return _CANDIDATES[place](model)


def locate_backbone(model: PreTrainedModel) -> int | None:
    """Return which of the usual places has the backbone, by a pass over two tokens; None for none of them."""
    if type(model) not in _BACKBONES:
        with torch.no_grad():
            places = (place for place, get in enumerate(_CANDIDATES) if _computes_states(model, get(model)))
            _BACKBONES[type(model)] = next(places, None)
    return _BACKBONES[type(model)]


def know_backbone(model: PreTrainedModel, place: int | None) -> None:
    """Take a place for that of the backbone, as it was found where the weights are."""
    _BACKBONES[type(model)] = place


_CANDIDATES: list[Callable[[PreTrainedModel], PreTrainedModel]] = [
    lambda model: model.base_model,
    lambda model: model.get_decoder(),
    lambda model: getattr(model, "model", model),
]
_BACKBONES: dict[type, int | None] = {}  # of each class, which candidate


def _computes_states(model: PreTrainedModel, part: PreTrainedModel) -> bool:
    """Return True if the model's forward pass runs ``part`` once, and hidden states come out."""
    if part is model:
        return False
    states: list[Tensor | None] = []
    hook = part.register_forward_hook(lambda *call: states.append(getattr(call[2], "last_hidden_state", None)))
    try:
        ids = torch.tensor([[3, 4]], device=model.get_input_embeddings().weight.device)
        model(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    return len(states) == 1 and states[0] is not None


class _Float32Head(nn.Linear):
    """An output layer whose product is in float32; its weights stay as they are."""

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden.float(), self.weight.float(), bias)


def cast_head_to_fp32(model: PreTrainedModel) -> None:
    """Let a model compute its logits in float32 from now on (arXiv 2510.13786); its config says so by vLLM's name.

    Raises:
        UserError: its output layer is not a plain linear one.
    """
    head = model.get_output_embeddings()
    if type(head) not in (nn.Linear, _Float32Head):
        raise UserError(
            f"learner.cast_lm_head_to_fp32: the output layer of {type(model).__name__} is a {type(head).__name__}, and "
            "only that of a plain linear layer is cast (an adapter on it is none: lora.targets)"
        )
    head.__class__ = _Float32Head
    model.config.get_text_config().head_dtype = "float32"


def has_fp32_head(model: PreTrainedModel) -> bool:
    """Return True for a model whose config says that its logits are computed in float32."""
    return getattr(model.config.get_text_config(), "head_dtype", None) == "float32"


@dataclass(frozen=True)
class LmHead:
    """The function from hidden states to logits: the output layer, then the model's scaling and soft-capping."""

    layer: Callable[[Tensor], Tensor]
    scale: float = 1.0
    cap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.layer(hidden) * self.scale if self.scale != 1.0 else self.layer(hidden)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    @property
    def linear(self) -> nn.Linear | None:
        """Return the output layer where it does what torch's linear layer does, and nobody watches; else None."""
        layer = self.layer
        plain = type(layer) in (nn.Linear, _Float32Head) and "forward" not in vars(layer)
        if not (plain and isinstance(layer, nn.Linear) and type(layer.weight) in (Tensor, nn.Parameter)):
            return None
        hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
        return None if any(hooks) else layer

    def product_dtype(self, hidden: Tensor) -> torch.dtype:
        """Return the precision that a linear output layer multiplies in."""
        return torch.float32 if isinstance(self.layer, _Float32Head) else hidden.dtype


def build_lm_head(model: PreTrainedModel | PeftModel) -> LmHead:
    """Build the function from hidden states to logits.

    Raises:
        NotProven: the model does something else to its logits (found by comparing on a few tokens), or has no such
            head.
    """
    model = unwrap_model(model)
    layer, config = model.get_output_embeddings(), model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    head = LmHead(layer, scale, getattr(config, "final_logit_softcapping", None))
    try:
        same = layer is not None and _is_models_own(model, head)
    except NotProven:
        raise
    except Exception as error:  # a model's own code, which may want more than tokens
        raise NotProven(f"its own code raises {type(error).__name__}: {str(error).splitlines()[0]}") from None
    if not same:
        raise NotProven("it does more to its logits than its output layer, a scale and a soft cap")
    return head


@torch.no_grad()
def _is_models_own(model: PreTrainedModel, compute_logits: Callable[[Tensor], Tensor]) -> bool:
    """Compare on four tokens. The hidden states are caught on their way, so dropout does not matter."""
    states: list[Tensor] = []
    device = next(model.parameters()).device
    hook = find_backbone(model).register_forward_hook(lambda *call: states.append(call[2].last_hidden_state))
    try:
        ids = torch.arange(4, device=device)[None] % model.config.get_text_config().vocab_size
        expected = model(input_ids=ids, use_cache=False).logits.float()
    finally:
        hook.remove()
    logits = compute_logits(states[0]).float()
    return logits.shape == expected.shape and torch.allclose(logits, expected, rtol=1e-3, atol=1e-3)
