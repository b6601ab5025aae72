import pytest
import torch
from torch import Tensor

from agentrl.engines.embedded.sampling import sample_tokens

ROWS = 20_000


def drawn(logits: list[float], **settings: float) -> tuple[Tensor, Tensor]:
    """Many draws from one distribution, with randomness of a fixed seed."""
    uniform = torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    columns = {name: torch.full((ROWS,), value) for name, value in settings.items()}
    return sample_tokens(torch.tensor(logits).expand(ROWS, -1), uniform, **columns)


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


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 2, {1, 3}),
        (1.0, 0, {0, 1, 2, 3}),
        (1.0, 9, {0, 1, 2, 3}),
        (0.39, 0, {3}),
        (0.41, 0, {1, 3}),
        (0.75, 0, {0, 1, 3}),
        (0.0, 0, {3}),
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
    tokens, logprobs = sample_tokens(
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
    tokens, _ = sample_tokens(logits, torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 2]
