"""The shape of a model: its sizes, from a table of names or its config.json. No weight is read."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from agentrl.errors import UserError
from agentrl.models.source import find_source
from agentrl.settings.load import LoadConfig

_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")


@dataclass(frozen=True)
class Shape:
    """Parameters and sizes of a model.

    Args:
        parameters: all of them; ``active``: those that a token goes through.
        layer: parameters of the largest layer; ``root``: of what is in no layer, such as embeddings.
        cache_values: keys and values of a token.
        attention: width of all heads together, of all layers.
    """

    parameters: int
    active: int
    layer: int
    root: int
    layers: int
    cache_values: int
    attention: int

    @property
    def has_experts(self) -> bool:
        """Return True where a token goes through a part of the parameters."""
        return self.active < self.parameters


@cache
def list_shapes() -> dict[str, dict[str, Any]]:
    """List the models whose sizes are known without their files, by name."""
    tables: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parent / "shapes.toml").read_text())
    return tables


def find_config(name: str, load: LoadConfig | None = None) -> PretrainedConfig:
    """Find a model's config: in the table of names, in a folder, on the hub.

    Raises:
        UserError: there is none.
    """
    tables = list_shapes()
    key = next((known for known in tables if name.lower() in (known.lower(), known.lower().partition("/")[2])), None)
    if key is not None:
        table = dict(tables[key])
        config: PretrainedConfig = AutoConfig.for_model(table.pop("model_type"), **table)
        return config
    source = find_source(name, load)
    try:
        gguf = {"gguf_file": source.gguf_file} if source.gguf_file else {}
        found: PretrainedConfig = AutoConfig.from_pretrained(source.place, **source.options, **gguf)
    except (OSError, ValueError) as error:
        known = ", ".join(tables)
        raise UserError(
            f"model {name!r}: no config.json could be read ({str(error).splitlines()[0]}); known without one: {known}"
        ) from None
    return found.get_text_config()


def find_positions(config: PretrainedConfig) -> int | None:
    """Find the number of a model's positions; None where it has no such limit, as with ALiBi or a recurrent state."""
    return next((int(number) for name in _POSITIONS if (number := getattr(config, name, None))), None)


def build_meta_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model that has shapes and no values. Raises UserError: its type is no causal language model."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        if type(config) in AutoModelForCausalLM._model_mapping:  # a model's own refusal
            raise
        raise UserError(f"model type {config.model_type!r} is no causal language model") from error
    return model.eval()


def measure_shape(model: PreTrainedModel) -> Shape:
    """Count a model's parameters, in all, of a token, of a layer. Raises UserError: its config has no such sizes."""
    config = model.config.get_text_config()
    parameters, depth = count_parameters(model), _read_size(config, "num_hidden_layers")
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth)
    sizes = [count_parameters(layer) for layer in layers]
    experts = int(getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0) or 0)
    chosen = next((int(v) for n in _CHOSEN if (v := getattr(config, n, None))), experts)
    in_experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    idle = in_experts * (experts - chosen) // experts if experts else 0
    heads = _read_size(config, "num_attention_heads")
    width = getattr(config, "head_dim", None) or _read_size(config, "hidden_size") // heads
    kept = getattr(config, "num_key_value_heads", None) or heads
    return Shape(
        parameters,
        parameters - idle,
        max(sizes),
        parameters - sum(sizes),
        len(sizes),
        2 * len(sizes) * int(kept) * int(width),
        len(sizes) * int(heads) * int(width),
    )


def _read_size(config: PretrainedConfig, name: str) -> int:
    size = getattr(config, name, None)
    if not size:
        raise UserError(f"a plan needs {name}, which a config of model type {config.model_type!r} does not have")
    return int(size)


def count_parameters(module: nn.Module) -> int:
    """Count parameters; tied ones once."""
    return sum(p.numel() for p in module.parameters())
