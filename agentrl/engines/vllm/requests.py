"""Requests to vLLM, in process or over HTTP: their checks, their parameters, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from agentrl.errors import UserError
from agentrl.rollout.token_context import find_bounds, write_json
from agentrl.types import Completion, SamplingParams

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
    return {
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


def parse_answer(answer: Any, params: SamplingParams) -> tuple[Completion, int] | None:
    """Read a server's answer: the turn, and how many tokens of its prompt were in the cache.

    None where the server was started anew meanwhile, and has its first weights again.
    """
    choice = answer["choices"][0]
    spans = [(s["version"], s["start"], s["end"]) for s in choice["weight_versions"] or ()]
    if any(not version.isdecimal() for version, _, _ in spans):
        return None
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    completion = build_completion(choice["token_ids"], logprobs, spans, params)
    return completion, int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def build_completion(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    spans: Iterable[tuple[str, int, int]],  # version, first token, past the last
    params: SamplingParams,
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
    completion = Completion(ids, tuple(logprobs), versions, "stop" if stopped else "length")
    return params.stop.cut_completion(completion) if params.stop is not None else completion
