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
from functools import lru_cache, partial
from typing import Any

import anyio
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.engines.embedded.plain_view import PlainModel
from agentrl.errors import UserError
from agentrl.learner.hidden_states import ALONE, EACH_TOKEN, PADDED, PREFIX, Packing, prove_prefix_sharing
from agentrl.learner.learner import Learner, LossSettings
from agentrl.learner.logprobs import token_logprobs
from agentrl.learner.packing import MicroBatch
from agentrl.models.lm_head import NotProven
from agentrl.models.miniature import CHUNKS, RULES, WINDOWS, WORDS, randomize_weights, shrink_settings, strip_settings
from agentrl.models.perturbation import NoSinglePrecision, to_double
from agentrl.types import Sample, SamplingParams

FAMILIES: list[str] = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WINDOW, CHUNK, LAYERS = 20, 8, 6
ALLOWED = 1e-4  # of a logprob, in float32
WINDOWED = " with windows"
ELSEWHERE = ". vLLM may: --engine vllm (docs/models.md)"
LISTED = " (docs/models.md)"

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
    "gemma3n_text": {
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 5,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2,
        "activation_sparsity_pattern": [0.95] * 3 + [0.0] * 7,
        "intermediate_size": [96] * 10,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "bamba": {"attn_layer_indices": [2, 5], "num_hidden_layers": 6},
    "xlstm": {"num_blocks": 6, "num_hidden_layers": 6},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention"] * 2, "num_hidden_layers": 6},
    "reformer": {"hash_seed": 0, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [32, 32]},
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
    if "is_decoder" in settings:
        settings["is_decoder"] = True  # as agentrl loads them
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
    how: str = "yes"
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


def own_logprobs(model: Any, row: Sequence[int], targets: Sequence[int]) -> Tensor:
    """The logprobs of some tokens of a row by the model's own forward pass over the row alone."""
    at = torch.tensor(targets)
    logits: Tensor = model(input_ids=torch.tensor([list(row)]), use_cache=False).logits
    logprobs = logits[0, at - 1].float().log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(row)[at, None])[:, 0]


def generated_logprobs(model: Any, row: Sequence[int], targets: Sequence[int]) -> Tensor:
    """Their logprobs by what ``generate`` would have sampled each from: for models that are not causal."""
    found = []
    for at in targets:
        ids = torch.tensor([row[:at]])
        options = {"use_cache": False, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        mask = torch.ones_like(ids)  # else padding would be told by its id
        logits: Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=1, pad_token_id=0, **options).logits[0]
        found.append(logits[0].float().log_softmax(-1)[row[at]])
    return torch.stack(found)


def learned(model: Any, packing: Packing) -> float:
    """How far logprobs and gradient of the learner's way are off the plain ones."""
    rows = samples()
    batch = MicroBatch.read(rows)
    logprobs, _ = token_logprobs(packing.build_head(model), packing.compute_states(model, batch), batch.targets)
    if packing is EACH_TOKEN:
        targets = [[i for i, mask in enumerate(row.loss_mask) if mask] for row in rows]
        wanted = torch.cat([generated_logprobs(model, r.token_ids, t) for r, t in zip(rows, targets, strict=True)])
        return float((logprobs.detach() - wanted).abs().max())
    wanted, wanted_gradient = own_answers(model)
    gradient = gradients(model, logprobs.mean())
    off = float((gradient - wanted_gradient).norm() / wanted_gradient.norm().clamp_min(1e-12))
    return max(float((logprobs.detach() - wanted).abs().max()), off / 10)


@lru_cache(maxsize=1)
def own_answers(model: Any) -> tuple[Tensor, Tensor]:
    """The logprobs of `samples` by the model's own passes, and the gradient of their mean."""
    rows = [(row.token_ids, [i for i, mask in enumerate(row.loss_mask) if mask]) for row in samples()]
    wanted = torch.cat([own_logprobs(model, ids, targets) for ids, targets in rows])
    return wanted.detach(), gradients(model, wanted.mean())


async def sampled(model: Any, engine: TransformersEngine) -> float:
    """Measure how far the logprobs of two turns of three episodes at once are off the model's own forward pass."""
    rng = random.Random(1)
    trunk = rng.choices(range(WORDS), k=30)
    contexts = [trunk, trunk, [*trunk, *rng.choices(range(WORDS), k=3)]]
    causal = getattr(engine._model, "is_causal", True)
    done: list[tuple[list[int], int, Any]] = []

    async def play(episode: int) -> None:
        ids = contexts[episode]
        for turn in range(2):
            params = SamplingParams(max_tokens=9 + 3 * episode, seed=episode)
            completion = await engine.generate(ids, params, session=str(episode))
            done.append(([*ids, *completion.token_ids], len(ids), completion))
            ids = [*done[-1][0], *random.Random(turn).choices(range(WORDS), k=5)]

    async with anyio.create_task_group() as episodes:
        for episode in range(3):
            episodes.start_soon(play, episode)
    off = 0.0
    for row, start, completion in done:
        with torch.no_grad():
            wanted = (own_logprobs if causal else generated_logprobs)(model, row, range(start, len(row)))
        off = max(off, float((wanted - torch.tensor(completion.logprobs)).abs().max()))
    return off


def train_verdict(model: Any) -> Verdict:
    try:
        packing = Learner(model, [], LossSettings(threads=1, packing="padded")).packing.plain
    except UserError as why:
        return Verdict(str(why))
    how = {PADDED: "yes", ALONE: "yes, each row alone", EACH_TOKEN: "yes, each token alone"}[packing]
    return Verdict(how=how, off=learned(model, packing))


def prefix_verdict(model: Any) -> Verdict:
    try:
        prove_prefix_sharing(model)
    except NotProven as why:
        return Verdict(f"no: {why}")
    return Verdict(off=learned(model, PREFIX))


async def engine_verdict(model: Any) -> Verdict:
    try:
        engine = TransformersEngine(model, capacity=4)
    except UserError as why:
        return Verdict(str(why))
    async with engine:
        view = engine._model
        if model.dtype == torch.float64:
            compute = partial(run_in_double, engine._batch.compute_logits)
            engine._batch.compute_logits = compute  # type: ignore[method-assign]
        return Verdict(how=describe_way(view), off=await sampled(model, engine))


def run_in_double(run: Callable[..., Any], *arguments: Any) -> Any:
    """Run a pass of the engine, in whose thread torch's modes have to be entered again."""
    with NoSinglePrecision():
        return run(*arguments)


def describe_way(view: object) -> str:
    """Name the engine's way through a model, as the table says it."""
    if not isinstance(view, PlainModel):
        return "fast"
    if view.way is None:
        return "plain, without a cache"
    how = "plain" if view.way.stacks else "plain, row by row"
    return how if view.way.extends else f"{how}, each turn anew"


def verdicts(model: Any) -> dict[str, Verdict]:
    """What agentrl says of a model, and how true it is: of training it, of sharing prefixes, of its own engine."""
    train = train_verdict(model)
    prefix = prefix_verdict(model) if train.how == "yes" else Verdict("no")
    return {"train": train, "prefix": prefix, "engine": anyio.run(engine_verdict, model)}


def verdict_in_double(name: str, way: str) -> Verdict:
    """One of a family's verdicts, with nothing computed in single precision: what is then off is no rounding."""
    tries: dict[str, Callable[[Any], Verdict]] = {
        "train": train_verdict,
        "prefix": prefix_verdict,
        "engine": lambda model: anyio.run(engine_verdict, model),
    }
    with NoSinglePrecision():
        return tries[way](to_double(subject(name)))


def cell(verdict: Verdict) -> str:
    """A verdict as the table in docs/models.md has it."""
    if verdict.refused is None:
        return verdict.how
    why = re.sub(r"^(agentrl cannot train|the embedded engine cannot run) \w+: ", "no: ", verdict.refused)
    return why.removesuffix(ELSEWHERE).removesuffix(LISTED)


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
        magnified = [way for way, verdict in found.items() if not verdict.right]
        wrong = [way for way in magnified if not verdict_in_double(name, way).right]
        print(table_row(name, found), *wrong, flush=True)


if __name__ == "__main__":
    main()
