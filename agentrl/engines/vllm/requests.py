"""Requests to vLLM, in process or over HTTP: their checks, their parameters, and what comes back."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from agentrl.errors import UserError
from agentrl.rollout.routed_experts import pack_experts
from agentrl.rollout.token_context import find_bounds, write_json
from agentrl.types import Completion, RoutedExperts, SamplingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

RETURN_FLAG = "enable_return_routed_experts"  # vLLM's
MIN_TEMPERATURE = 0.01  # vLLM takes lower temperatures, but for 0, as this one


def check_request(token_ids: Sequence[int], params: SamplingParams, vocabulary: int, max_context: int) -> None:
    """Check a request.

    Raises:
        UserError: vLLM would refuse it, change it silently, or die of it.
    """
    if not token_ids or params.max_tokens < 1:
        raise UserError("there must be a token to continue, and one to sample")
    if len(token_ids) + params.max_tokens > max_context:
        raise UserError(
            f"{len(token_ids)} tokens of context and {params.max_tokens} to sample do not fit "
            f"in {max_context} positions"
        )
    lowest, highest = find_bounds(token_ids)
    if lowest < 0 or highest >= vocabulary:
        wrong = next(t for t in token_ids if not 0 <= t < vocabulary)
        raise UserError(f"token id {wrong} is outside the model's vocabulary of {vocabulary}")
    if 0 < params.temperature < MIN_TEMPERATURE:
        raise UserError(f"vLLM samples at temperature 0 or from {MIN_TEMPERATURE} on, not at {params.temperature:g}")


def build_sampling_params(params: SamplingParams) -> dict[str, object]:
    """Build sampling parameters in vLLM's names. Turns end at the stop tokens alone, not at the model's end token."""
    start = params.routed_experts_start
    return {
        **({} if start is None else {"routed_experts_prompt_start": start}),
        "temperature": params.temperature,
        "max_tokens": params.max_tokens,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "seed": params.seed,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled token alone
    }


def build_text_params(params: SamplingParams) -> dict[str, object]:
    """Build the parameters of a server, which has a tokenizer: what a turn must match, and the strings that end it."""
    grammar = {"structured_outputs": dict(params.grammar.rules)} if params.grammar is not None else {}
    if params.stop is None:
        return {"detokenize": False, **grammar}
    return {"stop": list(params.stop.strings), "skip_special_tokens": False, **grammar}


def write_request(token_ids: Sequence[int], params: SamplingParams, adapter: str = "") -> bytes:
    """Write the body of a request to a server's ``/inference/v1/generate``, as JSON."""
    body: dict[str, object] = {"sampling_params": {**build_sampling_params(params), **build_text_params(params)}}
    if adapter:
        body["model"] = adapter
    return b'{"token_ids":%b,%b' % (write_json(token_ids), json.dumps(body).encode()[1:])


def parse_answer(
    answer: Any, params: SamplingParams, prompt_tokens: int = 0, layers: Sequence[int] = ()
) -> tuple[Completion, int] | None:
    """Read a server's answer: the turn, and how many tokens of its prompt were in the cache.

    None where the server was started anew meanwhile, and has its first weights again.

    Args:
        prompt_tokens, layers: of the prompt, and the model's that route, for routed experts.

    Raises:
        UserError: routed experts are asked for, and the server returns none.
    """
    choice = answer["choices"][0]
    spans = [(s["version"], s["start"], s["end"]) for s in choice["weight_versions"] or ()]
    if any(not version.isdecimal() for version, _, _ in spans):
        return None
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    routed = None
    if params.routed_experts_start is not None:
        routed = read_experts(
            _decode_array(choice.get("routed_experts")), prompt_tokens + len(choice["token_ids"]), params, layers
        )
    completion = build_completion(choice["token_ids"], logprobs, spans, params, routed)
    return completion, int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def _decode_array(text: str | None) -> NDArray[Any] | None:
    """Decode an array of a server's answer: a file of numpy in base 64."""
    import numpy as np

    return None if text is None else np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def read_experts(
    rows: NDArray[Any] | None, tokens: int, params: SamplingParams, layers: Sequence[int]
) -> RoutedExperts:
    """Read the experts that vLLM returns, (tokens, all layers, top_k), of the layers that route.

    Args:
        tokens: of prompt and turn; the last one has not passed.

    Raises:
        UserError: vLLM returns none.
        RuntimeError: they are of other tokens or layers than those that were asked for.
    """
    if rows is None:
        raise UserError(
            "vLLM returns no routed experts, which learner.router_replay needs: start it with agentrl serve --model "
            f"MODEL --vllm.{RETURN_FLAG} (on a GPU; docs/models.md)"
        )
    wanted = tokens - 1 - (params.routed_experts_start or 0)
    least = max(layers, default=0) + 1
    if rows.ndim != 3 or len(rows) != wanted or rows.shape[1] < least:
        raise RuntimeError(
            f"vLLM returns routed experts of shape {rows.shape}, not of {wanted} tokens and {least} layers or more"
        )
    return pack_experts(rows[:, list(layers)].astype("u1" if rows.itemsize == 1 else "u2"))


def build_completion(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    spans: Iterable[tuple[str, int, int]],  # version, first token, past the last
    params: SamplingParams,
    routed: RoutedExperts | None = None,
) -> Completion:
    """Build the completion of what vLLM sampled.

    Raises:
        FloatingPointError: the logprobs are not numbers.
        RuntimeError: vLLM gave the request up, or does not say which weights sampled each token.
    """
    if not all(isfinite(p) for p in logprobs):
        raise FloatingPointError("the policy's logits are not finite: its weights have diverged")
    ids, versions = tuple(token_ids), tuple(int(v) for v, start, end in spans for _ in range(start, end))
    text_ended = params.stop is not None and params.stop.is_contained(ids)
    stopped = text_ended or (bool(ids) and ids[-1] in params.stop_token_ids)
    if len(versions) != len(ids) or not (stopped or len(ids) == params.max_tokens):
        raise RuntimeError(f"vLLM ended a request after {len(ids)} of {params.max_tokens} tokens")
    completion = Completion(ids, tuple(logprobs), versions, "stop" if stopped else "length", routed_experts=routed)
    return params.stop.cut_completion(completion) if params.stop is not None else completion
