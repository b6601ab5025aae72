"""A model's miniature: the same class and the same settings, a few thousand weights, windows of a few tokens.

A model's class and settings decide which tokens see which, by what modules, under which masks; its widths do not. So
that can be tested in milliseconds, in float32, on rows longer than every window.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

WORDS = 96  # token ids a proof may use; those above are left to special tokens
VOCABULARY = 128
WEIGHTS = 30_000_000  # of a miniature at most: beyond, a width was not found

WINDOWS = r"(attention_|sliding_|keep_|local_)*window(_size)?(_.*)?|local_attention"
CHUNKS = r".*chunk_?(size|length)|index_block_size|block_size"

Settings = dict[str, Any]  # of a configuration: numbers, names, lists and dictionaries of them
Rule = tuple[str, Callable[[int], int]]


def _at_most(limit: int) -> Callable[[int], int]:
    return lambda old: min(old, limit)


def _heads(old: int) -> int:
    return old if old <= 2 else 4


# The name of a setting (matched whole) to its size here. The first that matches counts.
RULES: list[Rule] = [
    (r".*vocab(_size)?(_.*)?|.*_vocab", _at_most(VOCABULARY)),
    (
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_(source|target)_positions",
        _at_most(1024),
    ),
    (WINDOWS, _at_most(6)),
    (CHUNKS, _at_most(4)),
    (r"index_topk(_blocks)?", _at_most(2)),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts|zero_expert_num", _at_most(4)),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k|(moe_)?(n|num)_shared_experts", _at_most(2)),
    (r"n_group|topk_group|num_expert_group", _at_most(2)),
    (r"mamba_(n|num)_heads|n_mamba_heads", lambda _: 8),
    (r"mamba_d_head|mamba_head_?dim", lambda _: 16),
    (r"n_groups|mamba_n_?groups", _at_most(2)),
    (r"mamba_d_ssm", lambda _: 128),
    (r".*d_state|.*state_size|.*time_step_rank|.*dt_rank", _at_most(8)),
    (r"q[kv]_(rope|nope)_head_dim|rotary_dim", _at_most(8)),
    (r".*head_dim|attention_head_size|dim_head|d_head|kv_channels", _at_most(16)),
    (r".*num_(key_value_heads|kv_heads|query_groups)", _at_most(2)),
    (r"linear_num_key_heads", lambda _: 2),
    (r"index(er)?_n_heads", _at_most(16)),  # their scores are cut off at zero: of few heads many would tie
    (r".*(num_|n_)?heads?(_per_layer)?", _heads),
    (r".*(_rank|lowrank)", _at_most(16)),
    (r".*(intermediate|ffn|inner|feed_forward|dim_ff|dff|mlp)(_hidden)?(_size|_dim)?(_mlp)?", _at_most(96)),
    (
        r".*(hidden|embedding|embed|emb)_?(size|dim)(_.*)?|d_model|n_embd|dim|dim_model_base|lru_width|word_embed_proj_dim",
        _at_most(64),
    ),
]


def shrink_settings(settings: Settings, rules: Sequence[Rule] = RULES) -> Settings:
    """Copy a configuration's dictionary with every size brought down to its rule's."""
    small = {name: _shrink_one(name, value, rules) for name, value in settings.items()}
    for one, other in EQUAL:
        if settings.get(one) is not None and settings.get(one) == settings.get(other):
            small[one] = small[other]
    _fit_products(settings, small)
    if isinstance(small.get("rope_parameters"), dict):
        small["rope_parameters"] = _shrink_rope(small["rope_parameters"], small)
    return small


def _fit_products(settings: Settings, small: Settings) -> None:
    """Make sizes that must be the product of others so again."""
    if small.get("expand") and small.get("num_heads") and small.get("head_dim"):  # Mamba 2
        small["head_dim"] = small["hidden_size"] * small["expand"] // small["num_heads"]
    if "qk_dim_factor" in small:  # xLSTM's states have keys of a multiple of 64
        small["qk_dim_factor"] = 1.0
    if settings.get("attention_hidden_size") and "num_attention_heads" in small:  # Zamba attends over two states
        states = settings["attention_hidden_size"] // settings["hidden_size"]
        small["attention_hidden_size"] = states * small["hidden_size"]
        small["attention_head_dim"] = small["attention_hidden_size"] // small["num_attention_heads"]


# Settings that stay equal where they are, the second's rule counting.
EQUAL = [
    ("num_key_value_heads", "num_attention_heads"),
    ("head_dim", "qk_rope_head_dim"),
    ("lru_width", "hidden_size"),
]


def _shrink_rope(rope: Settings, small: Settings) -> Settings:
    """Cut lists with an entry for each pair of rotated dimensions to the number there is now."""
    width = small.get("head_dim") or small.get("hidden_size", 0) // (small.get("num_attention_heads") or 1)
    pairs = int(width * (rope.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1.0)) // 2
    shrunk = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            value = _shrink_rope(value, small)
        elif name.endswith("_factor") and isinstance(value, list):
            value = value[:pairs]
        elif name == "mrope_section":
            value = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        shrunk[name] = value
    return shrunk


def _shrink_one(name: str, value: Any, rules: Sequence[Rule]) -> Any:
    if isinstance(value, dict):
        return shrink_settings(value, rules)
    if isinstance(value, list) and all(type(v) is int for v in value):
        return [_shrink_one(name, v, rules) for v in value]
    if type(value) is not int:
        return value
    if re.search(r"token_(id|index)$", name):
        return value if value < WORDS else WORDS + value % (VOCABULARY - WORDS)
    return next((rule(value) for pattern, rule in rules if re.fullmatch(pattern, name)), value)


def build_miniature(model: PreTrainedModel) -> PreTrainedModel:
    """Build a model's miniature, in float32, its weights random and large enough that nothing hides.

    Raises:
        ValueError: its settings leave it large.
        Exception: whatever its class raises for settings that no checkpoint has.
    """
    small = type(model.config).from_dict(shrink_settings(strip_settings(model.config)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        miniature = _build_empty(type(model), small).float().eval()
        randomize_weights(miniature)
    return miniature


def strip_settings(config: PreTrainedConfig) -> Settings:
    """Return a configuration's dictionary without the entries that belong to one checkpoint."""
    settings: Settings = _strip(config.to_dict())
    return settings


def find_longest_window(config: PreTrainedConfig) -> int:
    """Return the longest window, chunk or block that a configuration names; 0 where it names none."""
    return _longest(config.to_dict())


def _longest(settings: Settings) -> int:
    named = [v for k, v in settings.items() if type(v) is int and re.fullmatch(f"{WINDOWS}|{CHUNKS}|index_topk", k)]
    return max([*named, *(_longest(v) for v in settings.values() if isinstance(v, dict))], default=0)


def _strip(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    left_out = ("quantization_config", "dtype", "_name_or_path", "output_attentions")
    return {name: _strip(v) for name, v in value.items() if name not in left_out}


def _build_empty(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        sizes = {n: p.numel() for n, p in model_class(copy.deepcopy(config)).named_parameters()}
    if sum(sizes.values()) > WEIGHTS:
        largest = max(sizes, key=lambda n: sizes[n])
        raise ValueError(f"{sum(sizes.values()):,} weights, {sizes[largest]:,} of them in {largest}")
    return model_class(config)


@torch.no_grad()
def randomize_weights(model: nn.Module) -> None:
    """Give matrices weights that keep the size of what goes through them, and everything else some noise."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(std=parameter[0].numel() ** -0.5)
        else:
            parameter.add_(0.3 * torch.randn_like(parameter))
