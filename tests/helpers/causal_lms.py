"""Every causal LM of transformers, small enough to try, and what agentrl makes of it.

A model is small, but its windows and chunks are larger than those of the miniature on which agentrl decides about it,
and its rows are longer than they.
"""

from __future__ import annotations

import copy
import random
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.errors import UserError
from agentrl.learner.hidden_states import PADDED, PREFIX, prove_prefix_sharing
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.logprobs import token_logprobs
from agentrl.learner.packing import MicroBatch
from agentrl.models.lm_head import NotProven, build_lm_head
from agentrl.models.miniature import CHUNKS, RULES, WINDOWS, WORDS, randomize_weights, shrink_settings, strip_settings
from agentrl.types import Sample, SamplingParams

FAMILIES: list[str] = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WINDOW, CHUNK, LAYERS = 20, 8, 6
ALLOWED = 1e-4  # of a logprob, in float32
WINDOWED = " with windows"
ELSEWHERE = ". vLLM may: --engine vllm (docs/models.md)"
LISTED = "; docs/models.md lists the models that can"

COMPASS = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [3, 3, 2]}
QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}

# Where a configuration's own defaults make no model, or hide what is particular about it.
OPTIONAL_WINDOWS = (
    "doge",
    "minimax",
    "ministral3",
    "mixtral",
    "phi3",
    "phi4_multimodal",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "starcoder2",
    "zaya",
)  # off by default

UNMADE = {
    "gemma3n": "not tried: transformers makes it with timm alone",
    "gemma4_assistant": "not tried: it drafts for another model, and is none by itself",
    "gemma4_unified_assistant": "not tried: it drafts for another model, and is none by itself",
    "musicgen": "not tried: its settings have no defaults; it writes music",
    "musicgen_melody": "not tried: its settings have no defaults; it writes music",
}

SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [32, 32]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": COMPASS, "sliding_attention": COMPASS},
        "layer_types": ["full_attention", "sliding_attention"] * 3,
        "num_hidden_layers": 6,
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "qwen4_exp": QWEN4,
    "qwen4_exp_text": QWEN4,
    "xmod": {"default_language": "en_XX"},
}


def family(name: str) -> tuple[Any, Any]:
    """The class that transformers has for a family's causal LM, and its settings by default."""
    name = name.removesuffix(WINDOWED)
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    config = CONFIG_MAPPING[name]()
    return model_class, config if isinstance(config, model_class.config_class) else config.get_text_config()


def small_settings(name: str) -> tuple[Any, Any, dict[str, Any]]:
    model_class, config = family(name)
    rules = [(WINDOWS, lambda old: min(old, WINDOW)), (CHUNKS, lambda old: min(old, CHUNK)), *RULES]
    settings = shrink_settings(strip_settings(config), rules) | SETTINGS.get(name.removesuffix(WINDOWED), {})
    if name.endswith(WINDOWED):
        settings |= {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
        settings.pop("layer_types", None)
    return model_class, config, settings


def has_optional_windows(name: str) -> bool:
    _, config = family(name)
    if name == "nemotron_h":  # its windows are a kind of layer
        return False
    return getattr(config, "sliding_window", 0) is None or getattr(config, "use_sliding_window", None) is False


def cut(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with fewer layers, and of every list with an entry for each as many of them."""
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"):
        count = settings.get(key)
        if isinstance(count, int) and count > LAYERS:
            lists = {k: v[:LAYERS] for k, v in settings.items() if isinstance(v, list) and len(v) == count}
            return settings | lists | {key: LAYERS}
    return settings


def subject(name: str) -> Any:
    """A small model of the family, in float32."""
    model_class, config, settings = small_settings(name)
    torch.manual_seed(0)
    for trial in (cut(settings), settings):
        try:
            model = model_class(type(config).from_dict(copy.deepcopy(trial))).eval()
            break
        except Exception as error:
            failed = error
    else:
        raise failed
    randomize_weights(model)
    return model


@dataclass
class Verdict:
    """A way's sentence where it is refused, how far it is off where it is not."""

    refused: str | None = None
    off: float = 0.0

    @property
    def right(self) -> bool:
        return self.refused is not None or self.off <= ALLOWED


def samples() -> list[Sample]:
    """Rows that begin alike, longer than every window; of some of their tokens."""
    rng = random.Random(0)
    trunk = rng.choices(range(WORDS), k=45)
    rows = [[*trunk, *rng.choices(range(WORDS), k=rng.randint(8, 20))] for _ in range(3)]
    masks = [[int(i > 20 and rng.random() < 0.7) for i in range(len(row))] for row in rows]
    return [Sample(r, m, [0.0] * len(r), [1.0] * len(r)) for r, m in sorted(zip(rows, masks, strict=True))]


def gradients(model: Any, value: Tensor) -> Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


def plainly(model: Any, rows: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """The trained tokens' logprobs by the model's own forward pass over each row alone, and their mean's gradient."""
    found = []
    for row in rows:
        ids = torch.tensor([row.token_ids])
        logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(-1, ids[0, 1:, None])[torch.tensor(row.loss_mask[1:]) > 0, 0])
    logprobs = torch.cat(found)
    return logprobs.detach(), gradients(model, logprobs.mean())


def learned(model: Any, states: Callable[[Any, MicroBatch], Tensor]) -> float:
    """How far logprobs and gradient of the learner's way are off the plain ones."""
    rows = samples()
    batch = MicroBatch(rows, [1.0] * len(rows))
    logprobs, _ = token_logprobs(build_lm_head(model), states(model, batch), batch.targets)
    gradient = gradients(model, logprobs.mean())
    wanted, wanted_gradient = plainly(model, rows)
    off = float((gradient - wanted_gradient).norm() / wanted_gradient.norm().clamp_min(1e-12))
    return max(float((logprobs.detach() - wanted).abs().max()), off / 10)


async def sampled(model: Any, engine: TransformersEngine) -> float:
    """How far the logprobs of two turns of two episodes are off the model's own forward pass."""
    rng, off = random.Random(1), 0.0
    for episode in range(2):
        ids = rng.choices(range(WORDS), k=30 + episode)
        for turn in range(2):
            done = await engine.generate(ids, SamplingParams(max_tokens=14, seed=turn), session=str(episode))
            whole = torch.tensor([[*ids, *done.token_ids]])
            with torch.no_grad():
                logprobs = model(input_ids=whole, use_cache=False).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
            wanted = logprobs.gather(-1, whole[0, len(ids) :, None])[:, 0]
            off = max(off, float((wanted - torch.tensor(done.logprobs)).abs().max()))
            ids = [*whole[0].tolist(), *rng.choices(range(WORDS), k=5)]
    return off


def train_verdict(model: Any) -> Verdict:
    try:
        Learner(model, [], LossSettings(threads=1, packing="padded"))
    except UserError as why:
        return Verdict(str(why))
    return Verdict(off=learned(model, PADDED.compute_states))


def prefix_verdict(model: Any) -> Verdict:
    try:
        prove_prefix_sharing(model)
    except NotProven as why:
        return Verdict(str(why))
    return Verdict(off=learned(model, PREFIX.compute_states))


async def engine_verdict(model: Any) -> Verdict:
    try:
        engine = TransformersEngine(model, capacity=4)
    except UserError as why:
        return Verdict(str(why))
    async with engine:
        return Verdict(off=await sampled(model, engine))


def verdicts(model: Any) -> dict[str, Verdict]:
    """What agentrl says of a model, and how true it is: of training it, of sharing prefixes, of its own engine."""
    train = train_verdict(model)
    prefix = prefix_verdict(model) if train.refused is None else train
    return {"train": train, "prefix": prefix, "engine": anyio.run(engine_verdict, model)}


def cell(verdict: Verdict) -> str:
    """A verdict as the table in docs/models.md has it."""
    if verdict.refused is None:
        return "yes"
    why = re.sub(
        r"^(agentrl cannot train|the embedded engine cannot run) \w+(, nor sample from it)?: ", "", verdict.refused
    )
    return "no: " + why.removesuffix(ELSEWHERE).removesuffix(LISTED)


def table_row(name: str, found: dict[str, Verdict]) -> str:
    return f"| {name} | " + " | ".join(cell(found[way]) for way in ("train", "prefix", "engine")) + " |"


def names() -> list[str]:
    """All families, and those again whose sliding windows are off by default."""
    return [*FAMILIES, *(name + WINDOWED for name in OPTIONAL_WINDOWS)]


def main() -> None:
    """Print the rows of the table in docs/models.md."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in sys.argv[1:] or names():
        if name in UNMADE:
            print(f"| {name} | {UNMADE[name]} | | |", flush=True)
            continue
        found = verdicts(subject(name))
        wrong = [way for way, verdict in found.items() if not verdict.right]
        print(table_row(name, found), *wrong, flush=True)


if __name__ == "__main__":
    main()
