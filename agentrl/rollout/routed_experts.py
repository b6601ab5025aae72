"""The experts that an engine's routers chose: asked for of each token once, in the turn that brings it, and packed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.types import RoutedExperts, SamplingParams, Segment, count_routed

if TYPE_CHECKING:
    from numpy.typing import NDArray


def ask_for_experts(params: SamplingParams, segments: Sequence[Segment]) -> SamplingParams:
    """Return the sampling of a turn behind some segments: routed experts are asked for where none are known yet.

    Those of a token stay as the turn said that brought it, whatever the weights of later turns: the tokens behind it
    were sampled with those.
    """
    if params.routed_experts_start is None:
        return params
    return replace(params, routed_experts_start=count_routed(segments))


def pack_experts(rows: NDArray[Any]) -> RoutedExperts:
    """Pack numbers of experts of 8 or 16 bits, (tokens, layers, top_k)."""
    experts = array("B" if rows.itemsize == 1 else "H")
    experts.frombytes(rows.tobytes())
    return RoutedExperts(experts, *rows.shape[1:])
