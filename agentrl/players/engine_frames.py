"""Sampling parameters and completions as they cross between a player and the run's engine, tokens as arrays."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.players.connection import Fields, Shown
from agentrl.renderer.stop_strings import StopStrings
from agentrl.types import Completion, KeptTokens, RoutedExperts, SamplingParams

_NUMBERS = ("temperature", "max_tokens", "top_p", "top_k", "seed", "min_p", "repetition_penalty")


def describe_params(params: SamplingParams) -> Fields:
    """Describe the sampling of a turn as JSON can hold it."""
    described: Fields = {name: getattr(params, name) for name in _NUMBERS}
    described["stop_token_ids"] = params.stop_token_ids
    if params.routed_experts_start is not None:
        described["routed_experts_start"] = params.routed_experts_start
    if params.stop is not None:
        described["stop"] = params.stop.strings
    if params.grammar is not None:
        described["grammar"] = True
    return described


def build_params(described: Shown, decode: Callable[[Sequence[int]], str], grammar: Any = None) -> SamplingParams:
    """Build the sampling that `describe_params` described; the grammar is the run's."""
    stop, numbers = described.get("stop"), {name: described[name] for name in _NUMBERS}
    return SamplingParams(
        **numbers,
        stop_token_ids=tuple(described["stop_token_ids"]),
        stop=StopStrings(tuple(stop), decode) if stop else None,
        grammar=grammar if described.get("grammar") else None,
        routed_experts_start=described.get("routed_experts_start"),
    )


def pack_completion(completion: Completion) -> tuple[Fields, list[bytes]]:
    """Pack a completion: fields of a frame's header, and the parts of its body. Nothing is rounded."""
    single = array("f", completion.logprobs)
    narrow = tuple(single) == completion.logprobs
    versions = set(completion.versions)
    fields: Fields = {"stop": completion.stop_reason, "n": len(completion.token_ids), "narrow": narrow}
    body: list[array[Any]] = [array("i", completion.token_ids), single if narrow else array("d", completion.logprobs)]
    if len(versions) == 1:
        fields["version"] = completion.versions[0]
    else:
        body.append(array("i", completion.versions))
    if completion.kept is not None:
        parts = completion.kept.words, completion.kept.ends, completion.kept.numbers
        fields["kept"] = [len(part) for part in parts]
        body += parts
    if (routed := completion.routed_experts) is not None:
        fields["routed"] = [routed.experts.typecode, len(routed.experts), routed.layers, routed.top_k]
        body.append(routed.experts)
    return fields, [part.tobytes() for part in body]


def unpack_completion(fields: Shown, body: bytes) -> Completion:
    """Read what `pack_completion` wrote."""
    at, count = 0, fields["n"]

    def take(kind: str, number: int) -> array[Any]:
        nonlocal at
        values = array(kind)
        values.frombytes(body[at : at + number * values.itemsize])
        at += number * values.itemsize
        return values

    token_ids, logprobs = tuple(take("i", count)), tuple(take("f" if fields["narrow"] else "d", count))
    versions = (fields["version"],) * count if "version" in fields else tuple(take("i", count))
    kept = KeptTokens(*(take("i", n) for n in fields["kept"])) if "kept" in fields else None
    routed = None
    if "routed" in fields:
        kind, number, *shape = fields["routed"]
        routed = RoutedExperts(take(kind, number), *shape)
    return Completion(token_ids, logprobs, versions, fields["stop"], kept, routed)
