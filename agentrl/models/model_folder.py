"""A model's folder, looked at before a library loads it: a stranger's may describe more than any machine can hold.

What is looked at: the sizes and the depth of its JSON, whether weights are data (safetensors) or programs (pickles),
and whether the model that ``config.json`` describes is of the size of the weights beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.models.tensor_file import check_room, read_header
from agentrl.models.tokenizer_file import check_added_tokens, check_tokenizer
from agentrl.settings.documents import parse_json, read_bounded

_JSON_BYTES = 16 << 20
_TOKENIZER_BYTES = 128 << 20  # of the files in which a vocabulary may be
_VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "vocab.txt", "spiece.model")
_TEMPLATE_BYTES = 1 << 20
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_ANY_SIZE = 1 << 50  # weights go to the device, one after the other
_IDS, _TOKEN = (int, list), (str, dict)
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {  # of what type a field is, where it is there and not null
    "config.json": {
        **dict.fromkeys(("eos_token_id", "bos_token_id"), _IDS),
        **dict.fromkeys(("quantization_config", "text_config", "auto_map"), (dict,)),
        "model_type": (str,),
        "architectures": (list,),
    },
    "generation_config.json": dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), _IDS),
    "tokenizer_config.json": {
        **dict.fromkeys(("eos_token", "bos_token", "pad_token", "unk_token"), _TOKEN),
        "added_tokens_decoder": (dict,),
        "chat_template": (str, list, dict),
        "tokenizer_class": (str,),
        "model_max_length": (int, float),
    },
}
_WORDS = {int: "a number", float: "a number", list: "a list", dict: "an object", str: "a text"}
_SLACK = 4  # a described size may be so many times that of the weights: what is tied is stored once


def check_model_folder(folder: Path) -> None:
    """Raise UserError, which names the folder and the file, if loading it may run something or fill the memory."""
    for path in sorted(folder.iterdir()):
        try:
            _check_file(path)
        except OSError as error:
            raise UserError(f"model {str(folder)!r}: {path.name} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"model {str(folder)!r}: {path.name}: {error}") from None
    weights = list(folder.glob("*.safetensors"))
    pickled = [path.name for path in folder.iterdir() if path.suffix in _PICKLES and "model" in path.name]
    if pickled and not weights:
        raise UserError(
            f"model {str(folder)!r}: its weights are pickles ({pickled[0]}), which may run anything as they are read; "
            "save it with safe_serialization=True where you trust it"
        )
    if weights:
        _check_weights(folder, weights)


def read_stored_dtype(folder: Path) -> str:
    """Return the type that most numbers of a folder's weights are stored in, by torch's name; float32 if none are."""
    counts: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        for _, dtype, size in read_header(path):
            counts[dtype] = counts.get(dtype, 0) + size
    most = max(counts, key=lambda dtype: counts[dtype], default="F32")
    return _DTYPES.get(most, most)


def _check_file(path: Path) -> None:
    if path.suffix == ".jinja":
        read_bounded(path, _TEMPLATE_BYTES)
    elif path.name in _VOCABULARIES:
        if path.stat().st_size > _TOKENIZER_BYTES:
            raise ValueError(f"it is larger than {_TOKENIZER_BYTES >> 20} MiB")
        if path.name == "tokenizer.json":
            _check_tokenizer(path)
    elif path.suffix == ".json":
        content = parse_json(read_bounded(path, _JSON_BYTES))
        if not isinstance(content, dict):
            raise ValueError("it is no object")
        _check_fields(content, _FIELDS.get(path.name, {}))
        check_added_tokens(content if path.name == "added_tokens.json" else content.get("added_tokens_decoder"))


def _check_fields(content: dict[str, Any], fields: dict[str, tuple[type, ...]]) -> None:
    for name, types in fields.items():
        value = content.get(name)
        numbers = types is not _IDS or all(type(i) is int for i in (value if isinstance(value, list) else [value]))
        if value is not None and not (isinstance(value, types) and not isinstance(value, bool) and numbers):
            expected = " or ".join(dict.fromkeys(_WORDS[t] for t in types))
            raise ValueError(f"{name} is {value!r:.80}, and should be {expected}")


def _check_tokenizer(path: Path) -> None:
    tokenizer = parse_json(read_bounded(path, _TOKENIZER_BYTES))
    if not isinstance(tokenizer, dict):
        raise ValueError("it is no object")
    check_tokenizer(tokenizer)


def _check_weights(folder: Path, weights: list[Path]) -> None:
    try:
        for path in weights:
            check_room(path, _ANY_SIZE)
        sizes = [size for path in weights for _, _, size in read_header(path)]
    except (OSError, ValueError) as error:
        raise UserError(f"model {str(folder)!r}: its weights cannot be read: {error}") from None
    if (folder / "config.json").is_file():
        _check_size(folder, sizes)


def _check_size(folder: Path, sizes: list[int]) -> None:
    config = parse_json(read_bounded(folder / "config.json", _JSON_BYTES))
    quantized = "quantization_config" in config
    total = sum(sizes) * (8 if quantized else 1)
    for part in (config, *(v for v in config.values() if isinstance(v, dict))):
        for what, described, stored in _compare(part, len(sizes), total):
            if described > _SLACK * stored:
                raise UserError(
                    f"model {str(folder)!r}: config.json describes {what}, and the weights beside it hold {stored:,}: "
                    "they do not belong together"
                )


def _compare(part: dict[str, Any], tensors: int, total: int) -> Iterator[tuple[str, int, int]]:
    """Yield what a part of a config describes, as a number, beside what the weights hold of it."""
    numbers = {name: v for name, v in part.items() if isinstance(v, int) and not isinstance(v, bool) and v > 0}
    width = max((numbers.get(name, 0) for name in ("hidden_size", "n_embd", "d_model", "dim")), default=0)
    for name in _LAYERS:
        yield f"{name} {numbers.get(name, 0):,}", numbers.get(name, 0), tensors
    for name in ("vocab_size", "intermediate_size", "n_inner", "ffn_dim", "d_ff"):
        product = numbers.get(name, 0) * width
        yield f"a matrix of {name} x {width:,} = {product:,} numbers", product, total
    heads = numbers.get("num_attention_heads", 0) * numbers.get("head_dim", 0) * width
    yield f"heads of {heads:,} numbers", heads, total
    yield f"a matrix of {width:,} x {width:,} numbers", width * width, total
    experts = max(numbers.get(name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    yield f"{experts:,} experts", experts, total
