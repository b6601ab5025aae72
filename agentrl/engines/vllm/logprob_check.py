"""Is what an engine reports the logprob of what it sampled from? Asked once, at its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agentrl.errors import UserError
from agentrl.types import Completion, SamplingParams

PROBE = SamplingParams(temperature=0.5, max_tokens=24, seed=1)  # far from 1: raw logprobs would differ
CLOSE = {torch.float32: 1e-2}  # nats, in the mean, between two implementations; far more where digits are few
ROUGH = 0.3


@dataclass(frozen=True)
class Mismatch:
    """Nats between an engine's logprobs and a forward pass of transformers on the same tokens."""

    mean: float
    max: float


def probe_ids(vocabulary: int, max_context: int) -> list[int]:
    """A prompt of arbitrary tokens."""
    generator = torch.Generator().manual_seed(0)
    length = max(1, min(24, max_context - PROBE.max_tokens))
    return torch.randint(vocabulary, (length,), generator=generator).tolist()


@torch.no_grad()
def compare(model: Any, context: Sequence[int], done: Completion) -> Mismatch:
    """How far off the engine is.

    Raises:
        UserError: it reports other logprobs than those at the probe's temperature, or runs another model.
    """
    ids = torch.tensor([[*context, *done.token_ids]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(context) - 1 : -1].float()
    tokens, reported = ids[0, len(context) :, None], torch.tensor(done.logprobs, device=model.device)

    def off(temperature: float) -> torch.Tensor:
        logprobs: torch.Tensor = (logits / temperature).log_softmax(-1).gather(1, tokens)[:, 0]
        return (logprobs - reported).abs()

    ours, raw = off(PROBE.temperature), off(1.0)
    found = Mismatch(float(ours.mean()), float(ours.max()))
    if found.mean <= CLOSE.get(model.dtype, ROUGH):
        return found
    if raw.mean() < ours.mean():
        raise UserError(
            "the engine reports logprobs before temperature; start vLLM with --logprobs-mode processed_logprobs"
        )
    raise UserError(
        f"the engine's logprobs are {found.mean:.3g} nats off those of {type(model).__name__} in transformers "
        f"(at most {found.max:.3g}): it runs other weights, or computes something else"
    )
