"""The packing of a policy: the plain way until shared prefixes are proven, and always where they are not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.learner import packing_choice
from agentrl.learner.distributed import ProcessGroup
from agentrl.learner.hidden_states import ALONE, PADDED, PREFIX
from agentrl.learner.packing_choice import FirstProcessEnded, PackingChoice
from agentrl.models.lm_head import LmHead, NotProven


class Worker(ProcessGroup):
    """A process after the first, which hears what it is told."""

    is_worker = True

    def __init__(self, told: Any) -> None:
        super().__init__()
        self.told = told

    def receive(self) -> Any:
        return self.told


class Teller(ProcessGroup):
    """The first process, whose words are kept."""

    told: Any = None

    def broadcast(self, message: Any) -> None:
        self.told = message


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return Qwen3ForCausalLM(config).eval()


def test_prefixes_are_shared_once_that_is_proven(model: Any) -> None:
    choice = PackingChoice.agree(model, "prefix", ProcessGroup())
    assert (choice.plain, choice.chosen, choice.why_plain) == (PADDED, None, "")
    choice.prove(model)
    assert choice.chosen is PREFIX


def test_who_wants_padded_rows_has_them_without_a_proof(model: Any) -> None:
    assert PackingChoice.agree(model, "padded", ProcessGroup()).chosen is PADDED


def test_what_is_not_proven_is_told_and_packed_the_plain_way(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise NotProven("its attention is its own")

    monkeypatch.setattr(packing_choice, "prove_prefix_sharing", fail)
    choice = PackingChoice.agree(model, "prefix", ProcessGroup())
    with pytest.warns(UserWarning, match=r'learner.packing = "padded"\): its attention is its own'):
        choice.prove(model)
    assert choice.chosen is PADDED


@pytest.mark.parametrize("why", ["", "its rows see each other"])
def test_the_others_take_what_the_first_process_chose(model: Any, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why:
        monkeypatch.setattr(packing_choice, "choose_plain_packing", lambda _: (ALONE, why))
    first = PackingChoice.agree(model, "prefix", teller := Teller())
    monkeypatch.setattr(packing_choice, "choose_plain_packing", lambda _: pytest.fail("asked without weights"))
    other = PackingChoice.agree(model, "prefix", Worker(teller.told))
    assert (other.plain, other.chosen, other.why_plain) == (first.plain, first.chosen, first.why_plain)
    assert type(other.lm_head) is type(first.lm_head)


def test_a_first_process_that_ended_chooses_nothing(model: Any) -> None:
    with pytest.raises(FirstProcessEnded):
        PackingChoice.agree(model, "prefix", Worker(None))


def test_the_head_moves_with_the_weights(model: Any) -> None:
    choice = PackingChoice.agree(model, "prefix", ProcessGroup())
    other = Qwen3ForCausalLM(model.config)
    with warnings.catch_warnings(action="error"):
        choice.move_head(other)
    assert isinstance(choice.lm_head, LmHead)
    assert choice.lm_head.layer is other.get_output_embeddings()
