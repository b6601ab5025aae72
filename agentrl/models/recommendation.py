"""The settings that a model's folder recommends, in ``agentrl.toml``: numbers that train or sample it well.

A folder may be a stranger's, so it names nothing that is loaded, run, read or reached. Beside numbers it may name what
agentrl itself lists: an optimizer, a schedule of the learning rate, a format of tool calls. An adapter's folder also
says there that it was trained with logits in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import tomli_w

from agentrl.errors import UserError
from agentrl.settings.documents import read_toml_table
from agentrl.settings.learner import LRSchedulerName
from agentrl.settings.loader import flatten
from agentrl.settings.registry import EntryKind, list_own

FILE = "agentrl.toml"
FP32_HEAD = "learner.cast_lm_head_to_fp32"  # of an adapter, which has no config.json to say it
NUMBERS = (
    *("steps", "engine.max_model_len", "engine.max_num_seqs", "engine.threads", "lora.alpha", "lora.rank"),
    *(f"rollout.{name}" for name in ("group_size", "max_tokens", "max_turns", "tasks_per_step", "temperature")),
    *(f"learner.{name}" for name in ("lr", "warmup_ratio", "warmup_steps", "weight_decay", "adam_epsilon")),
    *(f"learner.{name}" for name in ("beta", "delta", "entropy_coef", "epsilon", "epsilon_high", "max_grad_norm")),
    *(f"learner.{name}" for name in ("max_tokens_per_microbatch", "num_iterations", "threads")),
)
_OWN: Mapping[str, EntryKind] = {"learner.optimizer": "optimizer", "call_format": "call_format"}


def read_recommendation(folder: Path) -> dict[str, Any]:
    """Read the settings that a model's folder recommends; most recommend none.

    Raises:
        UserError: it recommends something else; the sentence names the key, and what to do.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        settings = read_toml_table(path)
    except ValueError as error:
        raise UserError(f"{path} is no valid TOML: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    for name, value in flatten(settings).items():
        _check(path, name, value)
    return settings


def write_recommendation(folder: Path, source: Path, *, fp32_head: bool) -> None:
    """Write the settings that the model's ``source`` recommends into a folder, and that its logits are in float32."""
    recommended: dict[str, Any] = {}
    with suppress(UserError):  # what cannot be heeded is not passed on
        recommended = read_recommendation(source)
    if fp32_head:
        section, _, name = FP32_HEAD.partition(".")
        recommended[section] = {**recommended.get(section, {}), name: True}
    if recommended:
        (folder / FILE).write_text(tomli_w.dumps(recommended), "utf-8")


def was_trained_with_fp32_head(folder: Path) -> bool:
    """Return True if the folder says that its adapter was trained with logits in float32. Raises UserError."""
    return bool(flatten(read_recommendation(folder)).get(FP32_HEAD))


def _check(path: Path, name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if (name in NUMBERS and is_number) or value in _list_names(name) or (name == FP32_HEAD and value is True):
        return
    if name in NUMBERS:
        why = f"{name} is a number, not {value!r:.80}"
    elif names := _list_names(name):
        why = f"{name} is one of {', '.join(names)} there, not {value!r:.80}"
    else:
        why = f"a model's folder recommends numbers alone, and not {name:.80} = {value!r:.80}"
    raise UserError(f"{path}: {why}. Nothing was run. Remove that line; if you want it, give --{name:.80} yourself")


def _list_names(name: str) -> list[str]:
    if name == "learner.lr_scheduler":
        return list(get_args(LRSchedulerName))
    return list_own(_OWN[name]) if name in _OWN else []
