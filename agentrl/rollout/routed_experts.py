"""The experts that an engine's routers chose, as an episode asks for them: of each token once, in the turn that brings
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl.types import SamplingParams, Segment, count_routed


def ask_for_experts(params: SamplingParams, segments: Sequence[Segment]) -> SamplingParams:
    """Return the sampling of a turn behind some segments: routed experts are asked for where none are known yet.

    Those of a token stay as the turn said that brought it, whatever the weights of later turns: the tokens behind it
    were sampled with those.
    """
    if params.routed_experts_start is None:
        return params
    return replace(params, routed_experts_start=count_routed(segments))
