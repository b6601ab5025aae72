"""A model's tensors as its checkpoints have them, a layer after the other: nobody needs room for all at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from agentrl.models.lm_head import unwrap_model

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

Layer = dict[str, Tensor]  # by the names of the checkpoints
Read = Callable[[Tensor], Tensor]  # what is made of a parameter


def iterate_layers(model: PreTrainedModel | PeftModel, read: Read) -> Iterator[Layer]:
    """Yield what ``read`` makes of the tensors of each layer, tied ones once.

    What the model holds fused (experts, mostly) is taken apart for one layer at a time. For a model with an adapter,
    the tensors are those of the model without it.
    """
    from transformers.core_model_loading import revert_weight_conversion

    plain = unwrap_model(model)
    parameters = {name: p for name, p in plain.named_parameters() if "lora_" not in name}
    for names in _group_by_layer(parameters):
        yield revert_weight_conversion(plain, {n.replace(".base_layer.", "."): read(parameters[n]) for n in names})


def iterate_adapter(model: PeftModel, read: Read) -> Iterator[Layer]:
    """Yield what ``read`` makes of an adapter's tensors, under the names of peft's checkpoints: one layer."""
    from peft import get_peft_model_state_dict

    parameters = dict(model.named_parameters())
    own = get_peft_model_state_dict(model, parameters, save_embedding_layers=False)
    yield {name: read(tensor) for name, tensor in own.items()}


def group_by_size(described: Iterable[Layer], least: int) -> Iterator[list[Layer]]:
    """Yield the layers that go together: as few as have so many bytes, and what is left."""
    group, taken = list[Layer](), 0
    for layer in described:
        group.append(layer)
        taken += measure_layer(layer)
        if taken >= least:
            yield group
            group, taken = [], 0
    if group:
        yield group


def measure_layer(layer: Layer) -> int:
    """Count the bytes of a layer."""
    return sum(t.numel() * t.dtype.itemsize for t in layer.values())


def merge_layers(layers: Iterable[Layer]) -> Layer:
    """Return the tensors of several layers."""
    return {name: tensor for layer in layers for name, tensor in layer.items()}


def _group_by_layer(names: Iterable[str]) -> Iterable[list[str]]:
    """Group parameters by the layer that they are in, such as ``model.layers.3.``; those in none are one group."""
    layers: dict[str, list[str]] = {}
    for name in names:
        within = re.match(r"\D*\.\d+\.", name)
        layers.setdefault(within.group() if within else "", []).append(name)
    return layers.values()
