"""Flags of vLLM's own server, which ``agentrl serve --vllm.FLAG value`` passes through by name.

Their names are read from vLLM's source where it is installed: importing it takes long.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from agentrl.errors import ConfigError, suggest

OWN = {  # what agentrl sets: by which option, or why
    "model": "--model",
    "model_tag": "--model",
    "dtype": "--dtype",
    "host": "--host",
    "port": "--port",
    "revision": "--revision",
    "tokenizer_revision": "--revision",
    "trust_remote_code": "--trust_remote_code",
    "max_model_len": "--max_model_len",
    "max_num_seqs": "--max_num_seqs",
    "tensor_parallel_size": "--tp",
    "data_parallel_size": "--dp",
    "gpu_memory_utilization": "--gpu_share",
    "api_key": "--api_key_env",
    "enable_lora": "--lora_rank",
    "max_lora_rank": "--lora_rank",
    "max_loras": "--lora_rank",
    "tool_call_parser": "--tool_parser",
    "enable_auto_tool_choice": "--tool_parser",
    "tool_parser_plugin": "--tool_parser",
    "weight_transfer_config": "--backend",
    "hf_overrides": "--cast_lm_head_to_fp32",
    **dict.fromkeys(
        ("enable_prefix_caching", "logprobs_mode", "generation_config", "enable_prompt_tokens_details"),
        "a training needs it as it is",
    ),
    **dict.fromkeys(
        ("worker_extension_cls", "enable_scale_out", "middleware", "tokens_only"),
        "weights and turns come by it",
    ),
    **dict.fromkeys(
        ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "uds", "root_path", "grpc_port"),
        "a training calls it over plain HTTP; put a tunnel before it",
    ),
}
_CLASSES = ("EngineArgs", "AsyncEngineArgs", "BaseFrontendArgs", "FrontendArgs")


def check_flags(flags: Mapping[str, object], known: Mapping[str, bool]) -> dict[str, object]:
    """Return flags by vLLM's names, with underscores.

    Args:
        known: all of vLLM's: by name whether it is a switch. None is checked where there are none.

    Raises:
        ConfigError: agentrl sets one itself, vLLM has none of the name, or a switch is neither true nor false.
    """
    checked: dict[str, object] = {}
    for typed, value in flags.items():
        name = typed.replace("-", "_")
        off = name.removeprefix("no_")
        if name not in known and known.get(off) and value is True:
            name, value = off, False
        if reason := OWN.get(name):
            raise ConfigError(f"--vllm.{typed}: agentrl sets it ({reason})")
        if known and name not in known:
            raise ConfigError(f"--vllm.{typed}: vLLM's server has no such flag{suggest_flag(name, known)}")
        if known.get(name) and not isinstance(value, bool):
            raise ConfigError(f"--vllm.{typed} is a switch: true or false, not {value!r}")
        if known and value is True and not known[name]:
            raise ConfigError(f"--vllm.{typed} has no value")
        checked[name] = value
    return checked


def suggest_flag(name: str, known: Mapping[str, bool]) -> str:
    """Return the end of a sentence that names the closest flag; nothing if none is close, as there are hundreds."""
    close = suggest(name, known.keys() - OWN.keys())
    return close if close.startswith("; did you mean") else " (vllm serve --help=all lists them)"


@cache
def list_installed_flags() -> dict[str, bool]:
    """List the flags of the vLLM that is installed, without importing it; none where it is not."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return {}
    return read_flags(Path(found.submodule_search_locations[0]))


def read_flags(package: Path) -> dict[str, bool]:
    """Read the flags from vLLM's source: the fields of its arguments' classes, and whether each is a switch."""
    files = [package / "engine" / "arg_utils.py", *(package / "entrypoints").rglob("cli_args.py")]
    trees = [ast.parse(file.read_text("utf-8")) for file in files if file.is_file()]
    return {
        field.target.id: ast.unparse(field.annotation) in ("bool", "bool | None")
        for tree in trees
        for part in tree.body
        if isinstance(part, ast.ClassDef) and part.name in _CLASSES
        for field in part.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def format_flag(name: str, value: object) -> list[str]:
    """Format one flag as words of a command line; nothing for None."""
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
