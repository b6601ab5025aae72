"""Adapters: the model's own weights stay as they are, small matrices beside them are trained (LoRA, arXiv 2106.09685).

By peft, which is imported only here, and only when there is an adapter.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.config import LoraConfig
from agentrl.errors import UserError
from agentrl.hub import quiet

MARK = "adapter_config.json"  # in a folder that holds an adapter
INSTALL = 'adapters need peft: pip install "agentrl-gym[lora]"'


def wrapped(model: Any, settings: LoraConfig, base: str) -> Any:
    """The model with a fresh adapter, which alone is trained. ``base`` is what the adapter's folder will name.

    Raises:
        UserError: peft is not installed, the model has an adapter already, or no layer has such a name.
    """
    peft = _peft()
    if isinstance(model, peft.PeftModel):
        raise UserError("the model has an adapter already; leave lora.rank out to train that one further")
    assert settings.rank is not None
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha or 2 * settings.rank,
        target_modules="all-linear" if settings.targets == ("all-linear",) else list(settings.targets),
        task_type="CAUSAL_LM",
    )
    try:
        made = peft.get_peft_model(model, config).eval()
    except ValueError as error:
        raise UserError(f"lora.targets {', '.join(settings.targets)}: {str(error).splitlines()[0]}") from None
    made.peft_config["default"].base_model_name_or_path = base
    return made


def is_adapter(folder: str | Path) -> bool:
    return (Path(folder) / MARK).is_file()


def base_of(folder: Path) -> str:
    """The model that an adapter's folder was trained on."""
    return str(_settings(folder)["base_model_name_or_path"])


def rank_in(folder: Path) -> int:
    """The largest rank of an adapter's folder."""
    settings = _settings(folder)
    return int(max([settings["r"], *settings.get("rank_pattern", {}).values()]))


def _settings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / MARK).read_text(encoding="utf-8"))
    return found


def attached(model: Any, folder: Path) -> Any:
    """The model with the adapter of a folder, which can be trained further."""
    return _peft().PeftModel.from_pretrained(model, folder, is_trainable=True).eval()


def quantization(dtype: torch.dtype) -> Any:
    """How transformers loads weights in 4 bits (QLoRA, arXiv 2305.14314): NF4, its scales in 8 bits.

    Raises:
        UserError: bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError('lora.quantize needs bitsandbytes: pip install "agentrl-gym[quant]"')
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def keep_differentiable(model: Any) -> Any:
    """Keep weights in 4 bits in the layout that has a gradient; return the model.

    On a CPU with bfloat16 instructions (``avx512_bf16``) bitsandbytes packs a weight anew at its first pass without a
    gradient, for a product that rounds to bfloat16 and has no backward pass: what samples would not be what is trained,
    nor what is sent. A weight that was packed already is unpacked.
    """
    for module in model.modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):  # bitsandbytes' Linear4bit
            continue
        module.support_avx512bf16_for_cpu = False
        weight = module.weight
        if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
            from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse as unpack

            weight.data, weight.quant_state = unpack(weight.data, weight.quant_state)
            module.quant_state = weight.quant_state
    return model


def in_full(parameter: Tensor) -> Tensor:
    """A parameter's values; of one in 4 bits those that it stands for."""
    if not hasattr(parameter, "quant_state"):
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    found: Tensor = dequantize_4bit(parameter.data, parameter.quant_state)
    return found


def has_adapter(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "merge_and_unload")


def merged(model: Any) -> Any:
    """The plain model, its adapter added to its weights."""
    return model.merge_and_unload() if has_adapter(model) else model


def merged_weight(linear: Any) -> Tensor:
    """A linear layer's weight, its adapters' added. Without one it is the parameter itself."""
    if isinstance(linear, nn.Linear):
        return linear.weight.detach()
    weight: Tensor = linear.base_layer.weight.detach()
    for name in linear.active_adapters:
        if name in linear.lora_A:
            weight = weight + linear.get_delta_weight(name).detach()
    return weight


def is_plain(linear: Any) -> bool:
    """Whether ``merged_weight`` says all there is about a layer: linear, perhaps with LoRA of the usual kind."""
    if type(linear) is nn.Linear:
        return True
    base = getattr(linear, "base_layer", None)
    usual = hasattr(linear, "get_delta_weight") and not any(getattr(linear, "use_dora", {}).values())
    return type(base) is nn.Linear and usual


def _peft() -> Any:
    quiet()  # it imports bitsandbytes, which speaks of a kernel that is not used here
    try:
        import peft
    except ImportError:
        raise UserError(INSTALL) from None
    return peft
