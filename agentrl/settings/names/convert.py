"""Values of other libraries as values here. Each function raises ValueError, with the reason, where there is none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

_OPTIMIZERS = {
    "adamw": ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_apex_fused", "adamw_anyprecision"),
    "adamw_8bit": ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"),
    "muon": ("muon",),
}
SHIPPED_REWARDS = {  # TRL's own, by the names that they have here
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "reasoning_accuracy",
    "think_format_reward": "think_format",
    "get_soft_overlong_punishment": "soft_overlong_punishment",
    "get_cosine_scaled_reward": "cosine_scaled",
    "get_repetition_penalty_reward": "repetition",
}
_FLOATS = {"float32": "float32", "fp32": "float32", "float": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
_FLOATS |= {"auto": "auto"}


def convert_optimizer(value: object) -> object:
    """Return the optimizer here that one of transformers is."""
    name = _get_word(value)
    for ours, theirs in _OPTIMIZERS.items():
        if name in theirs:
            return ours
    raise ValueError(f"there is no optimizer {name!r} here; those are {', '.join(_OPTIMIZERS)}")


def convert_word(value: object) -> object:
    """Return an enum's value, or the text itself."""
    return _get_word(value)


def convert_table(value: object) -> object:
    """Return a table; one in JSON, as a command line has it, is read."""
    table = json.loads(value) if isinstance(value, str) else value
    if not isinstance(table, Mapping):
        raise ValueError(f"a table of settings, not {value!r:.80}")
    return dict(table)


def convert_trackers(value: object) -> object:
    """Return the names of the trackers; none for ``none``."""
    names = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, Sequence) else []
    if names == ["all"]:
        raise ValueError("all is whatever is installed; name the trackers, such as wandb,tensorboard")
    return [str(name) for name in names if name not in ("none", "")]


def convert_dtype(value: object) -> object:
    """Return the type of the weights: float32, bfloat16 or auto, of torch's or as a word."""
    name = str(value).removeprefix("torch.")
    if name not in _FLOATS:
        raise ValueError(f"weights are in float32 or bfloat16, not in {name}")
    return _FLOATS[name]


def convert_revision(value: object) -> object:
    """Return the revision of a model; None for ``main``, the newest."""
    return None if value == "main" else value


def convert_rewards(value: object) -> object:
    """Return a list of rewards: one alone is a list of one; a name with a slash is a reward model's, as in TRL."""
    rewards = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    return [_name_reward(r.strip()) if isinstance(r, str) else r for r in rewards]


def _name_reward(name: str) -> str:
    return SHIPPED_REWARDS.get(name) or (f"reward-model:{name}" if "/" in name and ":" not in name else name)


def convert_truncated(value: object) -> object:
    """Return the stop reasons whose episodes are not trained."""
    return ["max_tokens"] if value else []


def convert_tool_iterations(value: object) -> object:
    """Return the turns of an episode: the tool calls, and the answer after them."""
    return int(value) + 1 if isinstance(value, int | float) else None


def convert_top_k(value: object) -> object:
    """Return the number of tokens that are sampled from; 0 for all, which vLLM writes -1."""
    return 0 if value == -1 else value


def convert_stop(value: object) -> object:
    """Return the strings that end a turn; a text is one of them, with its commas."""
    if value is None:
        return ()
    return [value] if isinstance(value, str) else value


def convert_regex(value: object) -> object:
    """Return what a turn must match, of a regular expression; nothing for none."""
    return {} if value is None else {"regex": value}


def convert_targets(value: object) -> object:
    """Return the layers that an adapter changes."""
    if isinstance(value, str):
        return [value] if value == "all-linear" else value.replace(" ", "").split(",")
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else value


def convert_rank(value: object) -> object:
    """Return an adapter's rank; None, for no adapter, where it is 0."""
    return value or None


def convert_reduction(value: object) -> object:
    """Return the loss here that sums the tokens as verl's mode does."""
    known = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
    name = _get_word(value)
    if name not in known:
        raise ValueError(f"there is no loss that sums tokens by {name}; known: {', '.join(known)}")
    return known[name]


def convert_router_replay(value: object) -> object:
    """Return whether the experts that the engine chose are replayed: verl's mode R3."""
    mode = _get_word(value)
    if mode not in ("disabled", "R3"):
        raise ValueError(
            f"experts are replayed as the engine chose them, R3, or not at all, disabled; not {mode}, which replays "
            "those of the learner's own pass for the old logprobs"
        )
    return mode == "R3"


def convert_logger(value: object) -> object:
    """Return verl's trackers: all but the console."""
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else []
    return [str(name) for name in names if name != "console"]


def convert_interval(value: object) -> object:
    """Return the steps between two of something; 0 for never, which verl writes -1."""
    return max(int(value), 0) if isinstance(value, int | float) else 0


def convert_engine(value: object) -> object:
    """Return the engine that a backend's name is."""
    known = {"vllm": "vllm", "hf": "transformers", "transformers": "transformers"}
    name = _get_word(value)
    if name not in known:
        raise ValueError(f"there is no engine {name!r} here; those are transformers, vllm and server")
    return known[name]


def _get_word(value: object) -> str:
    """Return an enum's value, or the text itself."""
    return str(getattr(value, "value", value))
