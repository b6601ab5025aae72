"""A model's folder, written a layer after the other, of weights that are in no process as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agentrl.models.checkpoint_layers import Layer, group_by_size, measure_layer, merge_layers
from agentrl.models.lora import has_adapter
from agentrl.models.tensor_file import write_tensors

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

FILE_BYTES = 1 << 30  # of tensors in a file, or one layer


class LayerSource(Protocol):
    """The weights, which come a layer after the other."""

    def describe_layers(self) -> Iterator[Layer]: ...
    def gather_layers(self) -> Iterator[Layer]: ...


def write_model(model: PreTrainedModel | PeftModel, source: LayerSource, folder: Path) -> None:
    """Write the folder that ``save_pretrained`` writes: weights and configuration, or an adapter and its settings."""
    folder.mkdir(parents=True, exist_ok=True)
    layers, described = source.gather_layers(), list(source.describe_layers())
    if has_adapter(model):
        _write(folder / "adapter_model.safetensors", described, layers)
        config = model.peft_config[model.active_adapter]
        trains, config.inference_mode = config.inference_mode, True  # as peft does
        config.save_pretrained(folder)
        config.inference_mode = trains
        return
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    groups = list(group_by_size(described, FILE_BYTES))
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        weight_map |= dict.fromkeys(merge_layers(group), name)
        _write(folder / name, group, islice(layers, len(group)))
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(map(measure_layer, described))}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write(path: Path, described: Iterable[Layer], layers: Iterable[Layer]) -> None:
    with path.open("wb") as file:
        write_tensors(file, merge_layers(described), layers, {"format": "pt"})
