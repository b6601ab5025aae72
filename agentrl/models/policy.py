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
from typing import Any

from agentrl import registry
from agentrl.config import TrainConfig
from agentrl.errors import ConfigError, UserError, nearest
from agentrl.hub import loading
from agentrl.layers import Layer, build, read_toml

RECOMMENDED = "agentrl.toml"  # in a model's folder: settings that suit it


@dataclass(frozen=True)
class Policy:
    """A model being trained, perhaps by an adapter; ``source`` is where it was loaded from."""

    model: Any
    tokenizer: Any
    source: str

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the ids that the model's own configs name as ends of a turn."""
        config = self.model.config
        places = (getattr(self.model, "generation_config", None), config, config.get_text_config())
        return _integers(getattr(place, "eos_token_id", None) for place in places)

    def save(self, folder: Path) -> None:
        """A folder that ``AutoModelForCausalLM.from_pretrained`` and ``--model`` load.

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


def locate(name: str) -> str:
    """A registered model, a folder, a run folder (its ``model``), or else a name on the model hub."""
    known = registry.available("model")
    if name in known:
        return str(registry.load("model", name)())
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
    if "/" not in name and "did you mean" in (hint := nearest(name, known)):
        raise UserError(f"no model {name!r}{hint}")  # before the hub is asked, which takes its time
    return name


def _holds_model(folder: Path) -> bool:
    """A model, or an adapter."""
    return (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()


def recommended(source: str) -> dict[str, Any]:
    """The settings a model's folder recommends; none for most."""
    path = Path(source) / RECOMMENDED
    return dict(read_toml(path)[1]) if path.is_file() else {}


def configured(*layers: Layer) -> TrainConfig:
    """Build a config over what the model's own folder recommends."""
    named = [layer["model"] for _, layer in layers if "model" in layer]
    model = str(named[-1] if named else TrainConfig.model_fields["model"].default)
    return build((f"recommended by {model}", recommended(locate(model))), *layers)


def resolved(settings: Mapping[str, Any], model: Any, tokenizer: Any = None) -> tuple[TrainConfig, Policy | None]:
    """The config of settings given in Python; and the policy, where ``model`` is one and not its name."""
    if isinstance(model, str):
        if tokenizer is not None:
            raise ConfigError(f"tokenizer is for a loaded model; {model!r} is a name, and has its own")
        return configured(("arguments", {**settings, "model": model})), None
    loaded = given(model, tokenizer)
    return build(("arguments", {**settings, "model": loaded.source})), loaded


def load(name: str, dtype: str = "float32", quantize: str | None = None) -> Policy:
    """Load a policy, on a GPU if there is one; its weights beside an adapter in fewer bits, if that is asked for.

    Raises:
        UserError: there is no such model, or it cannot be loaded; the sentence says why.
    """
    source = locate(name)
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(name)
    from agentrl import lora

    adapter = Path(source) if lora.is_adapter(source) else None
    base = locate(lora.base_of(adapter)) if adapter else source
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if quantize:
        given |= {"quantization_config": lora.quantization(given["dtype"]), "device_map": {"": device}}
    with _loading(name):
        model = AutoModelForCausalLM.from_pretrained(base, **given)
        model = lora.keep_differentiable(lora.attached(model, adapter) if adapter else model)
    return Policy(model if quantize else model.to(device), tokenizer, source)


def given(model: Any, tokenizer: Any = None) -> Policy:
    """A policy of a loaded model. Its tokenizer is found by the model's name, where it has one.

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
    from agentrl import lora

    return Policy(lora.keep_differentiable(model.eval()), tokenizer, source or type(model).__name__)


def checksum(model: Any) -> str:
    """Compute a checksum of all weights, by which the same ones are known again wherever they are."""
    import torch

    as_integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            bits = tensor.detach().contiguous().view(as_integers[tensor.element_size()])
            digest.update(f"{name} {tuple(tensor.shape)} {int(bits.sum(dtype=torch.int64))}".encode())
    return digest.hexdigest()


def load_tokenizer(name: str) -> Any:
    """The tokenizer alone. Raises UserError as ``load`` does."""
    source = locate(name)
    from transformers import AutoTokenizer

    with _loading(name):
        return AutoTokenizer.from_pretrained(source)


def load_end_tokens(name: str) -> tuple[int, ...]:
    """Return the ids that a model's configs name as ends of a turn, without loading its weights. Raises as `load`."""
    source = locate(name)
    from transformers import GenerationConfig, PreTrainedConfig

    from agentrl import lora

    source = locate(lora.base_of(Path(source))) if lora.is_adapter(source) else source
    found: list[Mapping[str, Any]] = []
    with suppress(OSError):  # many ship none
        found.append(GenerationConfig.from_pretrained(source).to_dict())
    with suppress(OSError):
        found.append(PreTrainedConfig.get_config_dict(source)[0])
    return _integers(place.get("eos_token_id") for one in found for place in (one, one.get("text_config") or {}))


def _integers(values: Iterable[Any]) -> tuple[int, ...]:
    """Return the different integers among values and lists of values, in order."""
    flat = [i for value in values for i in (value if isinstance(value, list | tuple) else [value])]
    return tuple(dict.fromkeys(i for i in flat if isinstance(i, int)))


def read_template(path: str | None) -> str | None:
    """The text of a Jinja file, if one is given."""
    try:
        return Path(path).read_text(encoding="utf-8") if path else None
    except OSError as error:
        raise ConfigError(f"chat_template: cannot read {path!r}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"chat_template: {path!r} is no text in UTF-8") from None


def _loading(name: str) -> AbstractContextManager[None]:
    return loading(f"model {name!r}", nearest(name, registry.available("model")))
