"""The place of a model: a registered name, a folder, a GGUF file, or a name on the model hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, UserError, suggest
from agentrl.models import gguf
from agentrl.models.model_folder import check_model_folder, read_stored_dtype
from agentrl.settings import registry
from agentrl.settings.load import LoadConfig

_FLOATS = {"float32": "float32", "float": "float32", "bfloat16": "bfloat16"}


@dataclass(frozen=True)
class ModelSource:
    """A model that was found.

    Args:
        place: a folder, or a repository on the hub.
        gguf_file: the file in it, where it is one of GGUF.
        options: for every ``from_pretrained`` of it: which revision, and whether its code may run.
    """

    name: str
    place: str
    gguf_file: str | None
    options: Mapping[str, Any]

    @property
    def is_folder(self) -> bool:
        """Return True for a folder of files that transformers loads."""
        return self.gguf_file is None and Path(self.place).is_dir()


def locate_model(name: str) -> str:
    """Find a model: a registered name, a folder, a run folder (its ``model``), a GGUF file, or else a name on the hub.

    Raises:
        UserError: there is no such model.
    """
    registered = registry.list_registered("model")
    if name in registered:
        return str(registry.load_registered("model", name)())
    path = Path(name)
    if holds_model(path / "model"):
        return str(path / "model")
    if path.is_dir():
        if not holds_model(path):
            files = sorted(file.name for file in path.glob("*" + gguf.SUFFIX))
            more = f"; give the file: {path / files[0]}" if files else ""
            raise UserError(
                f"model {name!r}: the folder has no config.json, and no model/config.json of a finished run{more}"
            )
        return str(path)
    if gguf.is_gguf(name) and path.is_file():
        return str(path)
    on_hub = 2 if gguf.is_gguf(name) else 1  # slashes: OWNER/REPOSITORY/FILE.gguf
    if name.startswith((".", "/", "~", "runs/")) or (name.count("/") > on_hub and not gguf.is_gguf(name)):
        raise UserError(f"no model {name!r}: there is no such folder (from {Path.cwd()})")
    if gguf.is_gguf(name) and name.count("/") < on_hub:
        raise UserError(
            f"no model {name!r}: there is no such file (from {Path.cwd()}); on the hub: OWNER/REPOSITORY/FILE.gguf"
        )
    if "/" not in name and "did you mean" in (hint := suggest(name, registered)):
        raise UserError(f"no model {name!r}{hint}")  # before the hub is asked, which takes its time
    return name


def find_source(name: str, load: LoadConfig | None = None) -> ModelSource:
    """Find a model, and look at its files where they are here.

    Raises:
        UserError: there is no such model, or its files are such that they are not loaded.
        ConfigError: a revision of what has none.
    """
    load = load or LoadConfig()
    located = locate_model(name)
    options: dict[str, Any] = {"trust_remote_code": load.trust_remote_code}
    if load.revision is not None:
        if Path(located).exists():
            raise ConfigError(
                f"load.revision {load.revision!r} is of a model of the hub; {name!r} is here, in {located!r}"
            )
        options["revision"] = load.revision
    if gguf.is_gguf(located):
        gguf.check_gguf_package()
        path = Path(located)
        if path.is_file():
            gguf.check_gguf_file(path)
            return ModelSource(located, str(path.parent), path.name, options)
        return ModelSource(located, *gguf.split_hub_name(located), options)
    if Path(located).is_dir():
        check_model_folder(Path(located))
    return ModelSource(located, located, None, options)


def check_tokenizer_files(source: ModelSource) -> None:
    """Check that a folder has a tokenizer.

    Raises:
        UserError: it has no file of one.
    """
    folder = Path(source.place)
    kinds = ("*token*", "vocab*", "*.tiktoken", "*.spm", "*.bpe", "*.vocab", "*spiece*", "*sentencepiece*")
    if (folder / "config.json").is_file() and not any(any(folder.glob(kind)) for kind in kinds):
        raise UserError(
            f"model {source.name!r}: the folder has no tokenizer; copy tokenizer.json and tokenizer_config.json of the "
            f"model that it is made of to {str(folder)!r}"
        )


def resolve_dtype(source: ModelSource, dtype: str) -> str:
    """Return ``float32`` or ``bfloat16``; of ``auto`` the type that the weights are stored in, float32 of GGUF.

    Raises:
        UserError: they are stored in a type in which nothing is trained.
    """
    if dtype != "auto":
        return dtype
    if source.gguf_file is not None:
        return "float32"
    from transformers import PreTrainedConfig

    config = PreTrainedConfig.get_config_dict(source.place, **source.options)[0]
    parts = [config, config.get("text_config") or {}]
    named = [str(part[key]) for part in parts for key in ("dtype", "torch_dtype") if part.get(key)]
    stored = named[0] if named else (read_stored_dtype(Path(source.place)) if source.is_folder else "float32")
    if stored not in _FLOATS:
        raise UserError(
            f"dtype auto: model {source.name!r} is stored in {stored}, in which nothing is trained here; say dtype "
            "float32 or bfloat16"
        )
    return _FLOATS[stored]


def holds_model(folder: Path) -> bool:
    """Return True for the folder of a model or an adapter."""
    return (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()
