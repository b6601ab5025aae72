"""GGUF files: llama.cpp's, with the weights, the tokenizer and the chat template of a model in one.

transformers reads them with the package ``gguf`` and unpacks the weights. Here the file is looked at before, and what
was read is made an ordinary model, which is trained, saved and sent like any other.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import UserError
from agentrl.settings.registry import check_package

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_MOST_DIMENSIONS = ("block_count", "embedding_length", "feed_forward_length", "context_length", "vocab_size")
_CONTEXT = 1 << 27  # positions


def is_gguf(name: str | Path) -> bool:
    """Return True for the name of a GGUF file."""
    return str(name).lower().endswith(SUFFIX)


def split_hub_name(name: str) -> tuple[str, str]:
    """Split ``OWNER/REPOSITORY/FILE.gguf`` into the repository and the file in it."""
    owner, repository, file = name.split("/", 2)
    return f"{owner}/{repository}", file


def check_gguf_package() -> None:
    """Raise UserError if the package that reads GGUF files is not installed."""
    check_package("a GGUF file", "gguf", "gguf")


def check_gguf_file(path: Path) -> None:
    """Raise UserError if a file is no GGUF, or describes more than it holds."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != _MAGIC:
            raise ValueError("it does not begin as a GGUF file does")
        stat = path.stat()
        _check_sizes(path, stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise UserError(f"model {str(path)!r} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a stranger's file, which gguf's reader takes as it comes
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"model {str(path)!r} is no GGUF file that can be read: {why}") from None


@lru_cache(maxsize=8)
def _check_sizes(path: Path, changed: int, size: int) -> None:
    """Read a file of that state once: a vocabulary takes gguf seconds, and a model's parts are loaded one by one."""
    from gguf import GGUFReader

    reader = GGUFReader(path)  # maps the file; a tensor that is not in it raises
    if not reader.tensors:
        raise ValueError("it holds no weights")
    stored = sum(math.prod(int(n) for n in tensor.shape) for tensor in reader.tensors)
    width = 1
    for name, field in reader.fields.items():
        if name.endswith(".embedding_length"):
            width = int(field.contents())
    for name, field in reader.fields.items():
        key = name.rpartition(".")[2]
        if key not in _MOST_DIMENSIONS or not isinstance(value := field.contents(), int):
            continue
        most = {"block_count": len(reader.tensors), "context_length": _CONTEXT}.get(key, 4 * stored // max(width, 1))
        if not 0 <= value <= most:
            raise ValueError(
                f"{name} is {value:,}, and the weights hold {stored:,} numbers: they do not belong together"
            )


def unpack_model(model: PreTrainedModel, source: str) -> PreTrainedModel:
    """Make the model that was read of a GGUF file an ordinary one, of which ``source`` is the name; return it."""
    model.hf_quantizer = None
    loose: Any = model
    loose.is_quantized = False
    model.config.__dict__.pop("quantization_config", None)
    model.config._name_or_path = source
    return model
