"""The routers of the families: found by their names, followed, and made to choose otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.models.lm_head import NotProven
from agentrl.models.miniature import build_miniature
from agentrl.models.routers import Routers, find_routers
from tests.helpers.tiny import qwen3

IDS = torch.arange(1, 8)[None]
# A module of its own at the high end of versions.
JAMBA = "model.layers.1.feed_forward" + (".router" if Version(transformers.__version__) >= Version("5.23") else "")


def build_large(name: str) -> Any:
    """A family's model as its config is by default, without its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name))


@pytest.mark.parametrize(
    ("name", "count", "first", "experts", "top_k"),
    [
        ("qwen2_moe", 24, "model.layers.0.mlp.gate", 60, 4),
        ("mixtral", 32, "model.layers.0.mlp.gate", 8, 2),
        ("gpt_oss", 36, "model.layers.0.mlp.router", 128, 4),
        ("deepseek_v3", 58, "model.layers.3.mlp.gate", 256, 8),
        ("llama4_text", 48, "model.layers.0.feed_forward.router", 16, 1),
        ("granitemoe", 32, "model.layers.0.block_sparse_moe.router", 8, 2),
        ("jamba", 16, JAMBA, 16, 2),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
@torch.no_grad()
def test_families_choose_what_they_are_told(name: str, count: int, first: str, experts: int, top_k: int) -> None:
    """Found on the large model; tried on its miniature, whose experts are given what was chosen."""
    large = build_large(name)
    found = find_routers(large)
    assert (len(found.names), found.names[0], found.experts, found.top_k) == (count, first, experts, top_k)
    small = build_miniature(large)
    routers = find_routers(small)
    assert routers.names == found.names
    own, other = dict[int, Tensor](), dict[int, Tensor]()

    def keep(place: int, scores: Tensor, chosen: Tensor) -> Tensor:
        own[place] = chosen
        return chosen

    def turn(place: int, scores: Tensor, chosen: Tensor) -> Tensor:
        other[place] = (own[place] + 1) % routers.experts
        return other[place]

    plain = small(input_ids=IDS, use_cache=False).logits
    with routers.choose(small, keep):
        torch.testing.assert_close(small(input_ids=IDS, use_cache=False).logits, plain, atol=0.0, rtol=0.0)
    with routers.choose(small, lambda place, scores, chosen: own[place].clone()):  # by the way of another choice
        torch.testing.assert_close(small(input_ids=IDS, use_cache=False).logits, plain, atol=1e-5, rtol=1e-5)
    reached = list[Tensor]()
    hooks = [
        module.register_forward_pre_hook(lambda _, args: reached.extend(a for a in args if _is_choice(a)))
        for name, module in small.named_modules()
        if name.endswith(".experts")
    ]
    with routers.choose(small, turn):
        turned = small(input_ids=IDS, use_cache=False).logits
    assert float((turned - plain).abs().max()) > 1e-4
    for hook in hooks:
        hook.remove()
    if reached:  # Llama 4 gives its experts the tokens, weighed
        assert len(reached) == len(other) == count
        assert all(torch.equal(reached[place], chosen) for place, chosen in other.items())
    else:
        assert name == "llama4_text"
    torch.testing.assert_close(small(input_ids=IDS, use_cache=False).logits, plain, atol=0.0, rtol=0.0)


def _is_choice(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()


@pytest.mark.parametrize(
    ("name", "why"),
    [("phimoe", "no module of it chooses experts by topk"), ("qwen3", "it is no mixture of experts")],
)
def test_routers_that_cannot_be_followed_say_why(name: str, why: str) -> None:
    with pytest.raises(NotProven, match=why):
        find_routers(build_large(name))


def test_layers_are_numbered_where_each_has_one_router() -> None:
    assert Routers(("model.layers.1.mlp.gate", "model.layers.3.mlp.gate"), 4, 2).list_layers() == (1, 3)
    for names in (("model.layers.1.a.router", "model.layers.1.b.router"), ("model.gate",)):
        with pytest.raises(NotProven, match="are not one in a numbered layer"):
            Routers(names, 4, 2).list_layers()
    with pytest.raises(NotProven, match="it is no mixture"):
        find_routers(qwen3())
