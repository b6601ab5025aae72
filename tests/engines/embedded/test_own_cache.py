"""A model's own cache, copied and stacked whatever its class."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig

from agentrl.engines.embedded.own_cache import count_bytes, describe_cache, select_rows, stack_caches


class Parts(NamedTuple):
    one: Tensor
    two: list[Tensor]


class Foreign:
    """A cache as a model's remote code may have it: of everything."""

    states: dict[int, Any]
    flags: dict[str, Any]

    def __init__(self, value: float, length: int, seen: int | None = None) -> None:
        self.config = LlamaConfig()
        self.states = {0: torch.full((1, 2, 3), value), 1: None}
        self.parts = Parts(torch.full((1, length), value), [torch.full((1, 4), value)])
        self.seen = length if seen is None else seen
        self.count = torch.tensor(length)
        self.flags = {"begun": True}


def test_rows_are_stacked_and_selected_in_all_that_a_cache_holds() -> None:
    caches: list[dict[str, Any]] = [{"state": Foreign(float(n), 5)} for n in range(3)]
    assert len({describe_cache(c) for c in caches}) == 1
    stacked = stack_caches(caches)
    assert stacked["state"].states[0][:, 0, 0].tolist() == [0, 1, 2]
    assert stacked["state"].states[1] is None
    assert stacked["state"].config is caches[0]["state"].config
    some = select_rows(stacked, [2, 0, 0])["state"]
    assert some.parts.one[:, 0].tolist() == [2, 0, 0]
    assert some.parts.two[0][:, 0].tolist() == [2, 0, 0]
    assert (some.seen, int(some.count), some.flags) == (5, 5, {"begun": True})


def test_a_copy_shares_nothing_with_its_source() -> None:
    source = {"state": Foreign(1.0, 5)}
    copy = select_rows(source, [0])
    copy["state"].states[0].zero_()
    copy["state"].states[1] = torch.ones(1)
    copy["state"].parts.two[0].zero_()
    copy["state"].count += 1
    assert source["state"].states[0].sum() == 6
    assert source["state"].states[1] is None
    assert source["state"].parts.two[0].sum() == 4
    assert source["state"].count == 5


def test_caches_differ_by_shape_position_or_kind() -> None:
    one = describe_cache({"state": Foreign(1.0, 5)})
    assert one == describe_cache({"state": Foreign(2.0, 5)})
    assert one != describe_cache({"state": Foreign(1.0, 6)})
    assert one != describe_cache({"state": Foreign(1.0, 5, seen=7)})
    assert one != describe_cache({"past_key_values": Foreign(1.0, 5)})


def test_the_rows_of_a_stack_do_not_show_in_its_description() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4), 0)
    pair = stack_caches([{"past_key_values": cache}] * 2)
    assert describe_cache(pair) == describe_cache({"past_key_values": cache})
    assert pair["past_key_values"].get_seq_length() == 5
    assert count_bytes(pair) == 2 * count_bytes({"past_key_values": cache}) == 2 * 2 * 40 * 4


def test_a_cache_that_holds_itself_ends() -> None:
    state = Foreign(1.0, 5)
    state.flags["self"] = state.states  # twice the same
    assert describe_cache({"state": state})
