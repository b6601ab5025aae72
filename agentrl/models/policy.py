"""The policy: a causal LM and its tokenizer, found by name."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError, UserError, suggest
from agentrl.models.hub import explain_load_errors
from agentrl.settings import registry
from agentrl.settings.loader import Layer, build_config, read_toml
from agentrl.settings.schema import TrainConfig

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RECOMMENDED = "agentrl.toml"  # in a model's folder: settings that suit it


@dataclass(frozen=True)
class Policy:
    """A model being trained, perhaps by an adapter; ``source`` is where it was loaded from."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    source: str

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the ids that the model's own configs name as ends of a turn."""
        config = self.model.config
        configs = (getattr(self.model, "generation_config", None), config, config.get_text_config())
        return _flatten_integers(getattr(c, "eos_token_id", None) for c in configs)

    def save(self, folder: Path) -> None:
        """Write a folder that ``AutoModelForCausalLM.from_pretrained`` and ``--model`` load.

        Raises:
            OSError: it cannot be written, or the disk is full.
        """
        # peft would ask the model hub whether an adapter touches the vocabulary: it does not
        adapter = {"save_embedding_layers": False} if hasattr(self.model, "peft_config") else {}
        try:
            self.model.save_pretrained(folder, **adapter)
            self.tokenizer.save_pretrained(folder)
        except Exception as error:  # safetensors and tokenizers have words of their own for a full disk
            if number := re.search(r"\(os error (\d+)\)", str(error)):
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
            raise
        for file in folder.glob("*.safetensors"):
            file.chmod(0o644)  # safetensors writes for the owner alone
        if (recommended := Path(self.source) / RECOMMENDED).is_file():
            shutil.copy(recommended, folder / RECOMMENDED)


def locate_model(name: str) -> str:
    """Find a model: a registered name, a folder, a run folder (its ``model``), or else a name on the model hub.

    Raises:
        UserError: there is no such model.
    """
    registered = registry.list_registered("model")
    if name in registered:
        return str(registry.load_registered("model", name)())
    path = Path(name)
    if _holds_model(path / "model"):
        return str(path / "model")
    if path.is_dir():
        if not _holds_model(path):
            raise UserError(
                f"model {name!r}: the folder has no config.json, and no model/config.json of a finished run"
            )
        return str(path)
    if name.startswith((".", "/", "runs/")) or name.count("/") > 1:
        raise UserError(f"no model {name!r}: there is no such folder (from {Path.cwd()})")
    if "/" not in name and "did you mean" in (hint := suggest(name, registered)):
        raise UserError(f"no model {name!r}{hint}")  # before the hub is asked, which takes its time
    return name


def _holds_model(folder: Path) -> bool:
    """Return True for the folder of a model or an adapter."""
    return (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()


def read_recommended(source: str) -> dict[str, object]:
    """Read the settings that a model's folder recommends; most recommend none."""
    path = Path(source) / RECOMMENDED
    return dict(read_toml(path)[1]) if path.is_file() else {}


def build_model_config(*layers: Layer) -> TrainConfig:
    """Build a config over what the model's own folder recommends."""
    models = [layer["model"] for _, layer in layers if "model" in layer]
    model = str(models[-1] if models else TrainConfig.model_fields["model"].default)
    return build_config((f"recommended by {model}", read_recommended(locate_model(model))), *layers)


def resolve_settings(
    settings: Mapping[str, object], model: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[TrainConfig, Policy | None]:
    """Build the config of settings given in Python; and the policy, where ``model`` is a model and not a name."""
    if isinstance(model, str):
        if tokenizer is not None:
            raise ConfigError(f"tokenizer is for a loaded model; {model!r} is a name, and has its own")
        return build_model_config(("arguments", {**settings, "model": model})), None
    loaded = wrap_policy(model, tokenizer)
    return build_config(("arguments", {**settings, "model": loaded.source})), loaded


def load_policy(name: str, dtype: str = "float32", quantize: str | None = None) -> Policy:
    """Load a policy, on a GPU if there is one. With ``quantize``, the weights beside an adapter are in 4 bits.

    Raises:
        UserError: there is no such model, or it cannot be loaded; the sentence says why.
    """
    source = locate_model(name)
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(name)
    from agentrl.models import lora

    adapter = Path(source) if lora.is_adapter(source) else None
    base = locate_model(lora.read_base_model(adapter)) if adapter else source
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if quantize:
        options |= {"quantization_config": lora.build_quantization(options["dtype"]), "device_map": {"": device}}
    with _load_errors(name):
        model = AutoModelForCausalLM.from_pretrained(base, **options)
        model = lora.keep_differentiable(lora.load_adapter(model, adapter) if adapter else model)
    return Policy(model if quantize else model.to(device), tokenizer, source)


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


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer alone. Raises UserError as `load_policy`."""
    source = locate_model(name)
    from transformers import AutoTokenizer

    with _load_errors(name):
        return AutoTokenizer.from_pretrained(source)


def load_end_tokens(name: str) -> tuple[int, ...]:
    """Read the ids that a model's configs name as ends of a turn, without its weights. Raises as `load_policy`."""
    source = locate_model(name)
    from transformers import GenerationConfig, PreTrainedConfig

    from agentrl.models import lora

    source = locate_model(lora.read_base_model(Path(source))) if lora.is_adapter(source) else source
    configs: list[Mapping[str, Any]] = []
    with suppress(OSError):  # many ship none
        configs.append(GenerationConfig.from_pretrained(source).to_dict())
    with suppress(OSError):
        configs.append(PreTrainedConfig.get_config_dict(source)[0])
    return _flatten_integers(
        part.get("eos_token_id") for config in configs for part in (config, config.get("text_config") or {})
    )


def _flatten_integers(values: Iterable[object]) -> tuple[int, ...]:
    """Return the different integers among values and lists of values, in order."""
    flat = [i for value in values for i in (value if isinstance(value, list | tuple) else [value])]
    return tuple(dict.fromkeys(i for i in flat if isinstance(i, int)))


def read_template(path: str | None) -> str | None:
    """Read a Jinja file, if one is given."""
    try:
        return Path(path).read_text(encoding="utf-8") if path else None
    except OSError as error:
        raise ConfigError(f"chat_template: cannot read {path!r}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"chat_template: {path!r} is no text in UTF-8") from None


def _load_errors(name: str) -> AbstractContextManager[None]:
    return explain_load_errors(f"model {name!r}", suggest(name, registry.list_registered("model")))
