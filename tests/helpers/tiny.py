"""Tiny random models of several families, and what engines are compared with."""

import random
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from time import perf_counter
from typing import Any

import anyio
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from agentrl.engines.embedded.engine import TransformersEngine
from agentrl.types import Completion, SamplingParams

VOCABULARY = 60
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
Make = Callable[[], Any]


def qwen3(**more: Any) -> Any:
    torch.manual_seed(0)
    return move_norms(Qwen3ForCausalLM(Qwen3Config(**SHAPE | more)))


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    )


def qwen2() -> Any:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"}))
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            torch.nn.init.normal_(projection.bias)
    return model


def sliding() -> Any:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=6))


def gemma3(**more: Any) -> Any:
    """Windows in two layers of three, two bases of rotation, norms of 1 + weight, four a layer."""
    torch.manual_seed(0)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
    }
    more = {"sliding_window": 6, "layer_types": types, "rope_parameters": ropes, "query_pre_attn_scalar": 11} | more
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE | {"num_key_value_heads": 1} | more))
    return move_norms(model)


def smollm3() -> Any:
    """A layer without rotations."""
    torch.manual_seed(0)
    return move_norms(SmolLM3ForCausalLM(SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1])))


def granite() -> Any:
    """Multipliers of embeddings, attention, sums and logits."""
    torch.manual_seed(0)
    factors = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
    shape = {k: v for k, v in SHAPE.items() if k != "head_dim"}
    return GraniteForCausalLM(GraniteConfig(**shape, **factors, logits_scaling=2.0))


def olmo2() -> Any:
    """A model that no fused pass is written for."""
    torch.manual_seed(0)
    return Olmo2ForCausalLM(Olmo2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"}))


def move_norms(model: Any) -> Any:
    """Make the weights of norms other than they begin: those would hide one that is left out."""
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data += 0.3 * torch.randn_like(weight)
    return model


def half() -> Any:
    return qwen3().to(torch.bfloat16)


FUSED = [qwen3, llama, qwen2, sliding, gemma3, smollm3, granite]
MODELS = [qwen3, llama, qwen2, sliding, gemma3, olmo2]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens)


@torch.no_grad()
def reference(model: Any, context: Sequence[int], done: Completion, params: SamplingParams) -> torch.Tensor:
    """The logprobs of a completion by a plain forward pass, its temperature, top_k and top_p written out."""
    ids = [*context, *done.token_ids]
    logits = model(input_ids=torch.tensor([ids])).logits[0, len(context) - 1 : -1].float() / (params.temperature or 1.0)
    if params.top_k:
        logits[logits < logits.topk(params.top_k).values[:, -1:]] = -torch.inf
    if params.top_p < 1.0:
        for row in logits:
            probabilities, order = row.softmax(-1).sort(descending=True)
            kept = int((probabilities.cumsum(-1) < params.top_p).sum()) + 1
            row[order[kept:]] = -torch.inf
    logprobs: torch.Tensor = logits.log_softmax(-1)
    return logprobs.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]


def error(model: Any, context: Sequence[int], done: Completion, params: SamplingParams) -> float:
    return float((reference(model, context, done, params) - torch.tensor(done.logprobs)).abs().max())


async def together(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """The results of calls that are made at the same time."""
    results: list[Any] = [None] * len(calls)

    async def one(index: int) -> None:
        results[index] = await calls[index]()

    async with anyio.create_task_group() as tasks:
        for index in range(len(calls)):
            tasks.start_soon(one, index)
    return results


async def conversation(engine: TransformersEngine, model: Any, number: int, params: SamplingParams) -> list[float]:
    """Several turns, each of its own length; how far each turn's logprobs are off."""
    rng = random.Random(number)
    ids = rng.choices(range(VOCABULARY), k=rng.randint(1, 20))
    off = []
    for turn in range(3):
        turn_params = SamplingParams(
            params.temperature, rng.randint(1, 15), (), params.top_p, params.top_k, seed=10 * number + turn
        )
        done = await engine.generate(ids, turn_params, session=str(number))
        assert len(done.token_ids) == turn_params.max_tokens
        off.append(error(model, ids, done, turn_params))
        ids += [*done.token_ids, *rng.choices(range(VOCABULARY), k=rng.randint(0, 5))]
        await anyio.sleep(rng.uniform(0, 0.01))
    engine.end_session(str(number))
    return off


async def disturbed(
    calls: Sequence[Callable[[], Awaitable[Any]]], act: Callable[[], Awaitable[Any]], part: float = 0.1
) -> list[Any]:
    """Return what the calls give where ``act`` begins amid them: after a part of the time they take without it."""
    seconds = inf
    for _ in range(2):  # the first time takes longer
        began = perf_counter()
        await together(*calls)
        seconds = min(seconds, perf_counter() - began)

    async def acted() -> None:
        await anyio.sleep(part * seconds)
        await act()

    return (await together(*calls, acted))[:-1]


async def updated_amid(engine: Any, calls: Sequence[Callable[[], Awaitable[Any]]], old: Any, new: Any) -> list[Any]:
    """Return what the calls give where an update from ``old`` to ``new`` meets all, which a busy machine may miss."""
    found: list[Any] = []
    for part in (0.1, 0.3, 0.5, 0.2, 0.05, 0.7):
        await engine.update_weights(old, 0)
        found = await disturbed(calls, lambda: engine.update_weights(new, 1), part)
        if all(set(done.versions) == {0, 1} for done in found):
            break
    return found
