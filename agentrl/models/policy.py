"""The policy: a causal LM and its tokenizer, found by name."""

from __future__ import annotations

import copy
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError, UserError, suggest
from agentrl.models import gguf
from agentrl.models.hub import explain_load_errors
from agentrl.models.recommendation import read_recommendation, was_trained_with_fp32_head, write_recommendation
from agentrl.models.source import ModelSource, check_tokenizer_files, find_source, locate_model, resolve_dtype
from agentrl.models.versions import warn_of_other_versions
from agentrl.renderer.chat_template import list_templates
from agentrl.settings import registry
from agentrl.settings.documents import read_bounded
from agentrl.settings.load import LoadConfig
from agentrl.settings.loader import Layer, build_config
from agentrl.settings.schema import TrainConfig

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from agentrl.models.streamed_model import LayerSource


@dataclass(frozen=True)
class Policy:
    """A model being trained, perhaps by an adapter; ``source`` is where it was loaded from."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    chat_template: Any = None  # to save it with, where it is not the tokenizer's own: a text, or a mapping of them

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the ids that the model's own configs name as ends of a turn."""
        config = self.model.config
        configs = (getattr(self.model, "generation_config", None), config, config.get_text_config())
        return _flatten_integers(getattr(c, "eos_token_id", None) for c in configs)

    def save(self, folder: Path, source: LayerSource | None = None) -> None:
        """Write a folder that ``AutoModelForCausalLM.from_pretrained`` and ``--model`` load.

        Args:
            source: of the weights, where the model itself is in shards.

        Raises:
            OSError: it cannot be written, or the disk is full.
        """
        # peft would ask the model hub whether an adapter touches the vocabulary: it does not
        adapter = {"save_embedding_layers": False} if hasattr(self.model, "peft_config") else {}
        try:
            if source is None:
                self.model.save_pretrained(folder, **adapter)
            else:
                from agentrl.models.streamed_model import write_model

                write_model(self.model, source, folder)
            tokenizer = self.tokenizer
            if self.chat_template is not None:
                tokenizer = copy.copy(tokenizer)
                tokenizer.chat_template = self.chat_template
            tokenizer.save_pretrained(folder)
        except Exception as error:  # safetensors and tokenizers have words of their own for a full disk
            if number := re.search(r"\(os error (\d+)\)", str(error)):
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
            raise
        for file in folder.glob("*.safetensors"):
            file.chmod(0o644)  # safetensors writes for the owner alone
        from agentrl.models import lm_head, lora

        fp32_head = lora.has_adapter(self.model) and lm_head.has_fp32_head(lm_head.unwrap_model(self.model))
        write_recommendation(folder, Path(self.source), fp32_head=fp32_head)


def build_model_config(*layers: Layer, defaults: Layer | None = None) -> TrainConfig:
    """Build a config over what the model's own folder recommends, and that over a verb's own ``defaults``.

    A run that ``--resume`` names has all its settings: one that it leaves out is none.
    """
    if any(name == "--resume" for name, _ in layers):
        return build_config(*layers)
    models = [layer["model"] for _, layer in layers if "model" in layer]
    model = str(models[-1] if models else TrainConfig.model_fields["model"].default)
    recommended = (f"recommended by {model}", read_recommendation(Path(locate_model(model))))
    return build_config(*([defaults] if defaults else []), recommended, *layers)


def resolve_settings(
    settings: Mapping[str, object],
    model: str | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    layers: Sequence[Layer] = (),
    defaults: Layer | None = None,
) -> tuple[TrainConfig, Policy | None]:
    """Build the config of settings given in Python; and the policy, where ``model`` is a model and not a name.

    Args:
        layers: of a verb, under the settings.
        defaults: of a verb, under what the model recommends.
    """
    if isinstance(model, str):
        if tokenizer is not None:
            raise ConfigError(f"tokenizer is for a loaded model; {model!r} is a name, and has its own")
        return build_model_config(*layers, ("arguments", {**settings, "model": model}), defaults=defaults), None
    loaded = wrap_policy(model, tokenizer)
    own = ("arguments", {**settings, "model": loaded.source})
    config = build_config(*([defaults] if defaults else []), *layers, own)
    for named, value in config.load:
        if value != LoadConfig.model_fields[named].default:
            raise ConfigError(f"load.{named} does nothing here: the model is loaded already")
    return config, loaded


def load_policy(
    name: str,
    dtype: str = "float32",
    quantize: str | None = None,
    load: LoadConfig | None = None,
    *,
    device: str | None = None,
    skeleton: bool = False,
) -> Policy:
    """Load a policy, on a GPU if there is one. With ``quantize``, the weights beside an adapter are in 4 bits.

    Args:
        device: another one.
        skeleton: where it can be made of the configuration alone, the weights are room for those of another process.

    Raises:
        UserError: there is no such model, or it cannot be loaded; the sentence says why.
    """
    warn_of_other_versions()
    load = load or LoadConfig()
    source = find_source(name, load)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from agentrl.models.lm_head import cast_head_to_fp32, has_fp32_head

    tokenizer = load_tokenizer(name, load)
    from agentrl.models import lora

    adapter = Path(source.place) if lora.is_adapter(source.place) else None
    base = find_base(source, load)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with _load_errors(name):
        options: dict[str, Any] = {**base.options, "dtype": getattr(torch, resolve_dtype(base, dtype))}
        if load.attn_implementation is not None:
            options["attn_implementation"] = load.attn_implementation
        options |= {"gguf_file": base.gguf_file} if base.gguf_file else {"use_safetensors": True}
        if quantize:
            options |= {"quantization_config": lora.build_quantization(options["dtype"]), "device_map": {"": device}}
        config = None if base.gguf_file else AutoConfig.from_pretrained(base.place, **base.options)
        if getattr(config, "is_decoder", None) is False:  # BERT and its kin: as a decoder no token sees those behind it
            options["is_decoder"] = True
        if skeleton and not (adapter or quantize or base.gguf_file):
            model = _build_skeleton(config, {name: options[name] for name in _CONFIGURED if name in options})
        else:
            model = AutoModelForCausalLM.from_pretrained(base.place, **options)
        model = gguf.unpack_model(model, base.name) if base.gguf_file else model
        if has_fp32_head(model) or (adapter and was_trained_with_fp32_head(adapter)):
            cast_head_to_fp32(model)
        model = lora.keep_differentiable(lora.load_adapter(model, adapter) if adapter else model)
    return Policy(model if quantize else model.to(device), tokenizer, source.name)


_CONFIGURED = ("dtype", "attn_implementation", "trust_remote_code", "is_decoder")  # of the options of loading


def _build_skeleton(config: Any, options: Mapping[str, Any]) -> PreTrainedModel:
    """Build a model whose weights are room that nothing was written to: it takes no memory yet."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
    model.to_empty(device="cpu")
    model.tie_weights()
    built: PreTrainedModel = model.eval()
    return built


def find_base(source: ModelSource, load: LoadConfig) -> ModelSource:
    """Find the model whose weights are loaded: of an adapter its base, in the revision that it was trained on."""
    from agentrl.models import lora

    if not lora.is_adapter(source.place):
        return source
    folder = Path(source.place)
    return find_source(
        lora.read_base_model(folder), load.model_copy(update={"revision": lora.read_base_revision(folder)})
    )


def wrap_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Policy:
    """Make a policy of a loaded model. By default its tokenizer is loaded by the model's name.

    Raises:
        UserError: it is no causal LM of transformers, or the tokenizer is missing.
    """
    if not all(hasattr(model, name) for name in ("config", "get_output_embeddings", "save_pretrained")):
        raise UserError(f"model is a name, a folder or a causal LM of transformers, not {type(model).__name__}")
    source = str(getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", ""))
    if tokenizer is None:
        if not source:
            raise UserError(f"the model, a {type(model).__name__}, has no name, and so no tokenizer; give one")
        tokenizer = load_tokenizer(source)
    from agentrl.models import lora

    return Policy(lora.keep_differentiable(model.eval()), tokenizer, source or type(model).__name__)


def compute_checksum(model: nn.Module) -> str:
    """Compute a checksum of all weights, by which the same ones are known again wherever they are."""
    import torch

    as_integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            bits = tensor.detach().contiguous().view(as_integers[tensor.element_size()])
            digest.update(f"{name} {tuple(tensor.shape)} {int(bits.sum(dtype=torch.int64))}".encode())
    return digest.hexdigest()


def load_tokenizer(name: str, load: LoadConfig | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer alone. Raises UserError as `load_policy`."""
    source = find_source(name, load)
    from transformers import AutoTokenizer

    gguf_file = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    if source.is_folder and not gguf_file:
        check_tokenizer_files(source)
    with _load_errors(name):
        return AutoTokenizer.from_pretrained(source.place, **source.options, **gguf_file)


def load_end_tokens(name: str, load: LoadConfig | None = None) -> tuple[int, ...]:
    """Read the ids that a model's configs name as ends of a turn, without its weights. Raises as `load_policy`."""
    load = load or LoadConfig()
    source = find_base(find_source(name, load), load)
    from transformers import GenerationConfig, PreTrainedConfig

    gguf_file = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    configs: list[Mapping[str, Any]] = []
    with _load_errors(name), suppress(OSError):  # many ship none
        configs.append(GenerationConfig.from_pretrained(source.place, **source.options).to_dict())
    with _load_errors(name), suppress(OSError):
        configs.append(PreTrainedConfig.get_config_dict(source.place, **source.options, **gguf_file)[0])
    return _flatten_integers(
        part.get("eos_token_id") for config in configs for part in (config, config.get("text_config") or {})
    )


def _flatten_integers(values: Iterable[object]) -> tuple[int, ...]:
    """Return the different integers among values and lists of values, in order."""
    flat = [i for value in values for i in (value if isinstance(value, list | tuple) else [value])]
    return tuple(dict.fromkeys(i for i in flat if isinstance(i, int)))


def find_template(tokenizer: Any, given: str | None) -> str | None:
    """Return the chat template that is given: one of the tokenizer's own by its name, or a Jinja file; None for none.

    Raises:
        ConfigError: it is neither.
    """
    named = list_templates(tokenizer)
    if not given or given in named:
        return named[given] if given else None
    try:
        return read_bounded(Path(given))
    except OSError as error:
        if not named or Path(given).suffix:
            raise ConfigError(f"chat_template: cannot read {given!r}: {error.strerror}") from None
        raise ConfigError(
            f"chat_template: {given!r} is no file, and none of the model's own templates{suggest(given, named)}"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"chat_template: {given!r} is no text in UTF-8") from None
    except ValueError as error:
        raise ConfigError(f"chat_template: {given!r}: {error}") from None


def _load_errors(name: str) -> AbstractContextManager[None]:
    """Explain errors of loading a model. One that is here is no misspelt name."""
    found = Path(locate_model(name)).exists()
    hint = "" if found else suggest(name, registry.list_registered("model"))
    return explain_load_errors(f"model {name!r}", hint, local=found)
