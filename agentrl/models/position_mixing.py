"""A search for modules that mix positions, by the outputs of a model's modules and the calls of its attention.

The model runs on two rows that differ in one token, with attention replaced by one in which each token sees itself
alone. A module whose output then moves at another position mixes positions by itself. The calls of attention are
recorded with their masks, which tell whether the window that attention is told of says all there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from agentrl.models.lm_head import find_backbone

SELF_ATTENTION = "agentrl_alone"  # attention in which each token sees itself alone


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention, as a layer made it."""

    module: str  # the layer's class
    mask: Tensor | None  # (batch or 1, heads or 1, tokens, tokens), True where a query sees a key
    window: int | None
    selects: bool = False  # its keys are picked by score

    def has_other_mask(self) -> bool:
        """Return True if the mask hides or shows more than order and the window that attention is told of."""
        if self.mask is None:
            return False
        keys = torch.arange(self.mask.shape[-1], device=self.mask.device)
        queries = keys[:, None]
        assumed = keys <= queries if self.window is None else (keys <= queries) & (keys > queries - self.window)
        seen = self.mask if self.mask.dtype == torch.bool else self.mask > -1.0
        return seen.shape[-2:] != assumed.shape or not bool((seen == assumed).all())


def find_mixing(
    model: PreTrainedModel, pair: Tensor, changed: int, tolerance: float
) -> tuple[str | None, list[AttentionCall]]:
    """Find the first module, innermost first, that mixes positions where attention does not.

    Args:
        pair: (2, tokens) token ids, which differ at position ``changed`` alone.
        tolerance: in standard deviations of an output, what counts as no change.

    Returns:
        The class of the module, None if there is none; and the calls of attention.
    """
    watch, calls = _ModuleWatch(model, changed, tolerance), list[AttentionCall]()
    backbone = find_backbone(model)
    with _use_self_attention(model, calls), watch:
        backbone(input_ids=pair, use_cache=False)
    return watch.mixing, calls


class _ModuleWatch:
    """Hooks on a model's own modules while the context is open. ``mixing`` is the class of the first that mixes."""

    def __init__(self, model: nn.Module, changed: int, tolerance: float) -> None:
        self.changed, self.tolerance = changed, tolerance
        self.mixing: str | None = None
        self._model = model
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> None:
        own = [m for m in self._model.modules() if not type(m).__module__.startswith("torch.nn")]
        self._hooks = [m.register_forward_hook(self._compare, with_kwargs=True) for m in own]

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _compare(self, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        if self.mixing is None and self._has_moved(output) and not self._has_moved((args, kwargs)):
            self.mixing = type(module).__name__

    def _has_moved(self, values: object) -> bool:
        """Return True if states of both rows, (2, tokens, width), differ at another position."""
        return any(self._differ(value) for value in _iterate_tensors(values))

    def _differ(self, states: Tensor) -> bool:
        if states.ndim != 3 or states.shape[0] != 2 or not states.is_floating_point():
            return False
        apart = (states[0] - states[1]).abs().amax(-1) / states.std().clamp_min(1e-12)
        apart[self.changed :][:1] = 0.0
        return bool(apart.max() > self.tolerance)


def _iterate_tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict | tuple | list):
        nested: Iterable[object] = values.values() if isinstance(values, dict) else values
        for value in nested:
            yield from _iterate_tensors(value)


_calls: ContextVar[list[AttentionCall]] = ContextVar("agentrl_attention_calls")


@contextmanager
def _use_self_attention(model: PreTrainedModel, calls: list[AttentionCall]) -> Iterator[None]:
    """Show each token itself alone, and append every call of attention to ``calls``, until the block ends."""
    before = model.config.get_text_config()._attn_implementation
    token = _calls.set(calls)
    try:
        model.set_attn_implementation(SELF_ATTENTION)
        yield
    finally:
        model.set_attn_implementation(before)
        _calls.reset(token)


def _attend_self(
    module: nn.Module,
    query: Tensor,  # (batch, heads, tokens, dim)
    key: Tensor,
    value: Tensor,  # (batch, kv heads, tokens, dim)
    attention_mask: Tensor | None,
    *args: object,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: each token's own value, (batch, tokens, heads, dim)."""
    selects = kwargs.get("indices") is not None
    _calls.get().append(AttentionCall(type(module).__name__, attention_mask, sliding_window, selects))
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None


def _write_out_mask(*args: object, **kwargs: object) -> Tensor:
    """Build the mask that scaled dot product attention would be given, also where it may be left out."""
    mask: Tensor = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
    return mask


AttentionInterface.register(SELF_ATTENTION, _attend_self)
AttentionMaskInterface.register(SELF_ATTENTION, _write_out_mask)
