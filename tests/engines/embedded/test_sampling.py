from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentrl.engines.embedded import sampling
from agentrl.engines.embedded.sampling import sample_tokens

ROWS = 20_000


def drawn(logits: list[float], **settings: float) -> tuple[Tensor, Tensor]:
    """Many draws from one distribution, with randomness of a fixed seed."""
    uniform = torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    columns: dict[str, Any] = {name: torch.full((ROWS,), value) for name, value in settings.items()}
    return sample_tokens(torch.tensor(logits).expand(ROWS, -1), uniform, **columns)[:2]


def test_tokens_come_as_often_as_their_probability_says() -> None:
    logits = [0.0, 1.0, -2.0, 2.0, 0.5]
    for temperature in (0.5, 1.0, 2.0):
        tokens, logprobs = drawn(logits, temperature=temperature)
        expected = (torch.tensor(logits) / temperature).softmax(-1)
        counts = torch.bincount(tokens, minlength=5).double()
        chi_square = ((counts - ROWS * expected) ** 2 / (ROWS * expected)).sum()
        assert chi_square < 18.5  # four degrees of freedom, p = 0.001
        torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_a_greedy_row_takes_the_best_token_and_reports_its_plain_probability() -> None:
    tokens, logprobs = drawn([0.0, 3.0, 1.0], temperature=0.0)
    assert set(tokens.tolist()) == {1}
    assert logprobs[0] == pytest.approx(torch.tensor([0.0, 3.0, 1.0]).log_softmax(-1)[1].item())


@pytest.mark.usefixtures("one_thread")
def test_logprobs_of_a_wide_vocabulary_are_exact() -> None:
    """As many tokens as Gemma's, of which torch's own softmax in single precision is off by 3e-5 and more."""
    scores = 3 * torch.randn(4, 262_144, generator=torch.Generator().manual_seed(0))
    tokens, logprobs, _ = sample_tokens(scores.clone(), torch.tensor([0.1, 0.4, 0.7, 0.99], dtype=torch.float64))
    exact = scores.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, atol=3e-6, rtol=0)


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 2, {1, 3}),
        (1.0, 0, {0, 1, 2, 3}),
        (1.0, 9, {0, 1, 2, 3}),
        (0.39, 0, {3}),
        (0.41, 0, {1, 3}),
        (0.75, 0, {0, 1, 3}),
        (0.01, 0, {3}),
        (0.75, 2, {1, 3}),
        (0.5, 3, {1, 3}),  # of the three that are left: .44, .33, .22
    ],
)
def test_top_p_and_top_k_keep_the_right_set(top_p: float, top_k: int, kept: set[int]) -> None:
    probabilities = torch.tensor([0.2, 0.3, 0.1, 0.4])
    tokens, logprobs = drawn(probabilities.log().tolist(), top_p=top_p, top_k=top_k)
    assert set(tokens.tolist()) == kept
    share = sum(probabilities[t].item() for t in kept)
    torch.testing.assert_close(logprobs, (probabilities[tokens] / share).log())


def test_every_row_has_its_own_settings() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(3, 1)
    tokens, logprobs, _ = sample_tokens(
        logits,
        torch.tensor([0.05, 0.05, 0.05], dtype=torch.float64),
        temperature=torch.tensor([1.0, 0.0, 1.0]),
        top_p=torch.tensor([1.0, 1.0, 1.0]),
        top_k=torch.tensor([0, 0, 1]),
    )
    assert tokens.tolist() == [0, 2, 2]
    torch.testing.assert_close(logprobs[:2], logits[0].log_softmax(-1)[[0, 2]])
    assert logprobs[2] == 0.0


def test_the_ends_of_the_unit_interval_and_impossible_tokens() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).repeat(2, 1)
    tokens, *_ = sample_tokens(logits, torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 2]


@st.composite
def samplings(draw: st.DrawFn) -> dict[str, float]:
    choices: dict[str, st.SearchStrategy[float]] = {
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.6]),
        "temperature": st.sampled_from([1.0, 0.5, 1.7]),
        "top_k": st.sampled_from([0, 2, 5, 39, 500]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3, 0.999]),
        "min_p": st.sampled_from([0.0, 0.05, 0.7]),
    }
    return {name: draw(values) for name, values in choices.items()}


def processors(how: dict[str, float]) -> LogitsProcessorList:
    """Transformers' own, in the order of its ``generate``."""
    made = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(float(how["repetition_penalty"]))])
    made.append(TemperatureLogitsWarper(float(how["temperature"])))
    if how["top_k"]:
        made.append(TopKLogitsWarper(int(how["top_k"])))
    if how["top_p"] < 1.0:
        made.append(TopPLogitsWarper(how["top_p"]))
    if how["min_p"]:
        made.append(MinPLogitsWarper(how["min_p"]))
    return made


@settings(deadline=None)
@given(rows=st.lists(samplings(), min_size=1, max_size=5), seed=st.integers(0, 999), likely=st.sampled_from([3, 1024]))
def test_each_row_is_sampled_from_what_transformers_processors_leave(
    rows: list[dict[str, float]], seed: int, likely: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(len(rows), 40, generator=generator)
    context = torch.randint(0, 40, (len(rows), 9), generator=generator)
    uniform = torch.rand(len(rows), dtype=torch.float64, generator=generator)
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, context, True)
    columns: dict[str, Any] = {n: torch.tensor([float(r[n]) for r in rows]) for n in rows[0]}
    columns["top_k"] = columns["top_k"].long()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "LIKELY", likely)
        tokens, logprobs, kept = sample_tokens(logits, uniform, seen=seen, **columns)
    assert kept is not None
    for i, how in enumerate(rows):
        expected = processors(how)(context[i : i + 1], logits[i : i + 1].clone())[0]
        assert torch.equal(kept[i], expected > -torch.inf)
        assert kept[i, tokens[i]]
        torch.testing.assert_close(logprobs[i], expected.log_softmax(-1)[tokens[i]])
        restricted = expected.log_softmax(-1)[kept[i]]
        assert restricted.exp().sum().item() == pytest.approx(1.0, abs=1e-5)


def test_what_is_equally_likely_is_kept_or_left_out_together_by_top_k() -> None:
    tokens, _ = drawn([0.0, 1.0, 1.0, 1.0], top_k=2)
    assert set(tokens.tolist()) == {1, 2, 3}


def test_a_token_of_no_probability_is_never_drawn_at_the_end_of_the_interval() -> None:
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(0)).repeat(50, 1)
    ends = torch.tensor([1.0 - 2.0**-k for k in range(4, 54)], dtype=torch.float64)
    sampled = sample_tokens(logits, ends, top_p=torch.full((50,), 0.7))
    assert sampled.kept is not None
    assert bool(sampled.kept.gather(1, sampled.tokens[:, None]).all())


def test_a_greedy_row_is_truncated_by_nothing_but_what_is_allowed() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 2)
    allowed = torch.tensor([[True] * 3, [False, True, True]])
    sampled = sample_tokens(
        logits, torch.zeros(2, dtype=torch.float64), torch.zeros(2), allowed=allowed, min_p=torch.full((2,), 0.9)
    )
    assert sampled.tokens.tolist() == [0, 1]
    expected = [logits[0].log_softmax(-1)[0].item(), logits[0, 1:].log_softmax(-1)[0].item()]
    assert sampled.logprobs.tolist() == pytest.approx(expected)
