"""Adapters: the model's own weights are frozen, small matrices beside them are trained (LoRA, arXiv 2106.09685).

peft is imported only here, and only when there is an adapter.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agentrl.errors import UserError
from agentrl.models.hub import silence_libraries
from agentrl.settings.documents import read_json
from agentrl.settings.learner import LoraConfig

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import BitsAndBytesConfig, PreTrainedModel

ADAPTER_CONFIG = "adapter_config.json"  # in a folder that holds an adapter
_MAX_RANK = 1 << 14
INSTALL = 'adapters need peft: pip install "agentrl-gym[lora]"'


def add_adapter(model: PreTrainedModel, settings: LoraConfig, base: str, revision: str | None = None) -> PeftModel:
    """Add a fresh adapter, which alone is trained. The adapter's folder will name ``base`` and its ``revision``.

    Raises:
        UserError: peft is not installed, the model has an adapter already, or no layer has such a name.
    """
    peft = _import_peft()
    if isinstance(model, peft.PeftModel):
        raise UserError("the model has an adapter already; leave lora.rank out to train that one further")
    assert settings.rank is not None
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha or 2 * settings.rank,
        target_modules="all-linear" if settings.targets == ("all-linear",) else list(settings.targets),
        task_type="CAUSAL_LM",
        revision=revision,
    )
    try:
        with _quiet_peft():
            wrapped = peft.get_peft_model(model, config).eval()
    except ValueError as error:
        raise UserError(f"lora.targets {', '.join(settings.targets)}: {str(error).splitlines()[0]}") from None
    wrapped.peft_config["default"].base_model_name_or_path = base
    return wrapped


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """Let peft ask a model by names that newer versions of transformers deprecate, unheard, until the block ends."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def is_adapter(folder: str | Path) -> bool:
    """Return True for a folder that holds an adapter."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def read_base_model(folder: Path) -> str:
    """Read the model that an adapter's folder was trained on."""
    return str(_read_settings(folder)["base_model_name_or_path"])


def read_base_revision(folder: Path) -> str | None:
    """Read the revision of the base model that an adapter's folder was trained on; None for the newest."""
    revision = _read_settings(folder).get("revision")
    return revision if isinstance(revision, str) and revision else None


def read_rank(folder: Path) -> int:
    """Read the largest rank of an adapter's folder."""
    settings = _read_settings(folder)
    return int(max([settings["r"], *settings.get("rank_pattern", {}).values()]))


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    try:
        settings = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"the adapter's {path} cannot be read: {error}") from None
    if not isinstance(settings, dict) or not isinstance(settings.get("base_model_name_or_path"), str):
        raise UserError(f"the adapter's {path} names no base model")
    if settings.get("peft_type", "LORA") != "LORA" or settings.get("megatron_config"):  # the latter imports by name
        raise UserError(f"the adapter's {path} is not of plain LoRA, which alone is loaded here")
    if not isinstance(rank := settings.get("r"), int) or not 1 <= rank <= _MAX_RANK:
        raise UserError(f"the adapter's {path}: r is a whole number from 1 to {_MAX_RANK}, not {rank!r:.80}")
    return settings


def load_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Wrap the model with the adapter of a folder, which can be trained further. Raises UserError."""
    _read_settings(folder)
    peft = _import_peft()
    with _quiet_peft():
        return peft.PeftModel.from_pretrained(model, folder, is_trainable=True).eval()


def build_quantization(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Build transformers' settings for weights in 4 bits (QLoRA, arXiv 2305.14314): NF4, its scales in 8 bits.

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


def keep_differentiable(model: PreTrainedModel | PeftModel) -> PreTrainedModel | PeftModel:
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


def dequantize(parameter: Tensor) -> Tensor:
    """Return a parameter's values; of one in 4 bits those that it stands for."""
    if not hasattr(parameter, "quant_state"):
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    values: Tensor = dequantize_4bit(parameter.data, parameter.quant_state)
    return values


def describe_dequantized(parameter: Tensor) -> Tensor:
    """Return a tensor without values of the shape and the type that `dequantize` returns."""
    state = getattr(parameter, "quant_state", parameter)
    return torch.empty(state.shape, dtype=state.dtype, device="meta")


def has_adapter(model: nn.Module) -> bool:
    """Return True for a model that peft has wrapped."""
    return hasattr(model, "peft_config") and hasattr(model, "merge_and_unload")


def merge_adapter(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the plain model, with its adapter added to its weights."""
    return model.merge_and_unload() if has_adapter(model) else model


def compute_merged_weight(linear: nn.Linear | LoraLayer) -> Tensor:
    """Add a linear layer's adapters to its weight; without adapters it is the parameter itself."""
    if isinstance(linear, nn.Linear):
        return linear.weight.detach()
    weight: Tensor = linear.base_layer.weight.detach()
    for name in linear.active_adapters:
        if name in linear.lora_A:
            weight = weight + linear.get_delta_weight(name).detach()
    return weight


def is_plain_linear(linear: nn.Module) -> bool:
    """Return True if ``compute_merged_weight`` is all there is to a layer: linear, perhaps with plain LoRA."""
    if type(linear) is nn.Linear:
        return True
    base = getattr(linear, "base_layer", None)
    usual = hasattr(linear, "get_delta_weight") and not any(getattr(linear, "use_dora", {}).values())
    return type(base) is nn.Linear and usual


def _import_peft() -> Any:
    silence_libraries()  # it imports bitsandbytes, which speaks of a kernel that is not used here
    try:
        import peft
    except ImportError:
        raise UserError(INSTALL) from None
    return peft
