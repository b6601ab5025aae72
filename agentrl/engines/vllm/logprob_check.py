"""A check, once an engine has started: its logprobs are those of the distribution that it samples from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from agentrl.errors import UserError
from agentrl.types import Completion, SamplingParams

PROBE_PARAMS = SamplingParams(temperature=0.5, max_tokens=24, seed=1)  # far from 1: raw logprobs would differ
CLOSE = {torch.float32: 1e-2}  # nats, in the mean, between two implementations; far more where digits are few
ROUGH = 0.3


@dataclass(frozen=True)
class LogprobMismatch:
    """Nats between an engine's logprobs and a forward pass of transformers on the same tokens."""

    mean: float
    max: float


def draw_probe_prompt(vocabulary: int, max_context: int) -> list[int]:
    """Draw a prompt of arbitrary tokens."""
    generator = torch.Generator().manual_seed(0)
    length = max(1, min(24, max_context - PROBE_PARAMS.max_tokens))
    return torch.randint(vocabulary, (length,), generator=generator).tolist()


@torch.no_grad()
def check_logprobs(model: PreTrainedModel, context: Sequence[int], completion: Completion) -> LogprobMismatch:
    """Measure how far the engine's logprobs are off those of a forward pass of transformers.

    Raises:
        UserError: it reports other logprobs than those at the probe's temperature, or runs another model.
    """
    ids = torch.tensor([[*context, *completion.token_ids]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(context) - 1 : -1].float()
    tokens, reported = ids[0, len(context) :, None], torch.tensor(completion.logprobs, device=model.device)

    def compute_distance(temperature: float) -> torch.Tensor:
        logprobs: torch.Tensor = (logits / temperature).log_softmax(-1).gather(1, tokens)[:, 0]
        return (logprobs - reported).abs()

    own, raw = compute_distance(PROBE_PARAMS.temperature), compute_distance(1.0)
    mismatch = LogprobMismatch(float(own.mean()), float(own.max()))
    if mismatch.mean <= CLOSE.get(model.dtype, ROUGH):
        return mismatch
    if raw.mean() < own.mean():
        raise UserError(
            "the engine reports logprobs before temperature; start vLLM with --logprobs-mode processed_logprobs"
        )
    raise UserError(
        f"the engine's logprobs are {mismatch.mean:.3g} nats off those of {type(model).__name__} in transformers "
        f"(at most {mismatch.max:.3g}): it runs other weights, or computes something else"
    )
