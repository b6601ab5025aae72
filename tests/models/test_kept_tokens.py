"""Sets of kept tokens: as masks, as numbers, and back."""

from __future__ import annotations

import pickle
from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from agentrl.models.kept_tokens import decode_kept, encode_kept, penalize_repetition
from agentrl.types import KeptTokens

CPU = torch.device("cpu")


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    rows, vocabulary = draw(st.integers(0, 6)), draw(st.integers(1, 200))
    shares = [draw(st.sampled_from([0.0, 0.01, 0.1, 0.9, 1.0])) for _ in range(rows)]
    noise = torch.rand(rows, vocabulary, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return noise < torch.tensor(shares)[:, None]


@given(mask=masks())
def test_a_mask_comes_back_from_its_numbers(mask: torch.Tensor) -> None:
    kept = KeptTokens.collect(encode_kept(mask))
    assert len(kept) == len(mask)
    assert torch.equal(decode_kept(kept.sets(), mask.shape[1], CPU), mask)
    words = -(-mask.shape[1] // 32) + 1
    assert all(len(one) <= words for one in kept.sets())


def test_alike_sets_are_kept_once_and_stay_one_object_in_a_message() -> None:
    mask = torch.zeros(500, 10_000, dtype=torch.bool)
    mask[::2, 5:9000] = True
    mask[1::2, 7] = True
    kept = KeptTokens.collect(encode_kept(mask))
    assert len(kept.ends) == 2
    assert len(pickle.dumps(kept.sets())) < 20_000
    assert len({id(one) for one in kept.sets()}) == 2


def test_none_keeps_all() -> None:
    assert decode_kept([None, array("i", [2])], 3, CPU).tolist() == [[True] * 3, [False, False, True]]


def test_numbers_that_do_not_fit_together_are_refused() -> None:
    words, ends = array("i", [1, 2]), array("i", [2])
    for wrong in ((words, ends, array("i", [1])), (words, array("i", [3]), array("i", [0])), (words, ends, [-1])):
        with pytest.raises(ValueError, match="sets of kept tokens"):
            KeptTokens(wrong[0], wrong[1], array("i", wrong[2]))


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_the_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = 5 * torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    context = torch.randint(0, 30, (4, 12), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, context, True)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(context, logits.clone())
    torch.testing.assert_close(penalize_repetition(logits, seen, penalty), expected)
