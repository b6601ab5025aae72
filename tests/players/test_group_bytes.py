"""A group on the wire: what comes out is what went in, and what is broken is refused."""

from __future__ import annotations

import json
from array import array
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.players.arrived import take_group
from agentrl.players.engine_frames import build_params, describe_params, pack_completion, unpack_completion
from agentrl.players.group_bytes import pack_group, unpack_group
from agentrl.training.plain_state import decode, encode
from agentrl.types import (
    CallRecord,
    Completion,
    Fault,
    Group,
    KeptTokens,
    RoutedExperts,
    SamplingParams,
    Segment,
    Stop,
    Thread,
    ThreadRole,
    Trajectory,
)

KEPT = KeptTokens(array("i", [1, 2, 3]), array("i", [2, 3]), array("i", [0, 1, 0]))
ROUTED = RoutedExperts(array("B", [0, 255] * 5), 1, 2)
WIDE = RoutedExperts(array("H", [0, 511, 7]), 1, 1)


def make_trajectory(**values: Any) -> Trajectory:
    segments = (
        Segment("prompt", (1, 2, 3)),
        Segment("model", (4, 5, 6), (-0.5, -1.25, -0.1), (3, 3, 4), KEPT, ROUTED),
        Segment("env", (7,)),
        Segment("model", (8,), (-0.25,), (4,), None, WIDE),
        Segment("model", (9, 9)),
    )
    messages = ({"role": "user", "content": "half a \ud83d pair, and €"},)
    return Trajectory(7, segments, messages, Stop.MAX_TURNS, **values)  # type: ignore[arg-type]


def cross(group: Group) -> Group:
    header, body = pack_group(group)
    return unpack_group(json.loads(json.dumps(header)), b"".join(body))


def test_a_group_crosses_as_it_is() -> None:
    full = make_trajectory(
        rewards={"a": 0.1, "b": None},
        weights={"a": 2.0},
        step_rewards=(0.1, 1 / 3),
        timings={"total": 0.25},
        calls=(CallRecord(0, "search", "ok", 0.5, (1, 2)), CallRecord(1, "x", "parse", 0.0)),
        fault=Fault("tool_timeout", "it was slow", None),
        info={"seen": (1, {2, 3}), 4: b"bytes", "long": 1 << 80},
        metrics={"m": float("inf")},
        temperature=0.7,
        shared_turns=1,
        threads=(Thread(ThreadRole.FORK, 0, 1, (0, 2), 1, ({"role": "user", "content": "x"},)),),
    )
    group = Group(7, (full, make_trajectory()))
    again = cross(group)
    assert again == group
    assert again.trajectories[0].calls[0].span == (1, 2)


def test_numbers_of_numpy_and_torch_cross_as_plain_ones() -> None:
    numbers: Any = {"a": np.float32(0.5), "b": np.int64(2), "c": torch.tensor(1.5)}
    steps: Any = (np.float32(0.25),)
    full = make_trajectory(rewards=numbers, weights=numbers, metrics=numbers, step_rewards=steps)
    (crossed,) = cross(Group(7, (full,)))
    plain = {"a": 0.5, "b": 2.0, "c": 1.5}
    assert (crossed.rewards, crossed.weights, crossed.metrics, crossed.step_rewards) == (plain, plain, plain, (0.25,))


def test_logprobs_are_never_rounded_and_nan_stays() -> None:
    segment = Segment("model", (1, 2), (-0.1, -0.30000000000000004), (0, 0))
    group = Group(1, (Trajectory(1, (segment,), (), Stop.TERMINATED),))
    assert cross(group) == group
    odd = Segment("model", (1,), (float("nan"),), (0,))
    crossed = cross(Group(1, (Trajectory(1, (odd,), (), Stop.TERMINATED),)))
    assert str(crossed.trajectories[0].segments[0].logprobs) == "(nan,)"


def test_info_that_is_no_plain_data_crosses_as_a_run_folder_keeps_it() -> None:
    group = Group(1, (make_trajectory(info={"thing": object(), "answer": "42"}),))
    assert cross(group).trajectories[0].info == {"thing": "<object>", "answer": "42"}


@given(st.data())
def test_bytes_that_are_no_group_are_refused_by_a_value_error(data: st.DataObject) -> None:
    header, parts = pack_group(Group(7, (make_trajectory(info={"a": 1}), make_trajectory())))
    body = bytearray(b"".join(parts))
    if data.draw(st.booleans()):
        body = body[: data.draw(st.integers(0, len(body)))]
    else:
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(ValueError):  # one that reads as another group is not seen: who has the key is trusted with that
        unpack_group(header, bytes(body))


def test_a_header_of_another_number_of_members_is_refused() -> None:
    header, parts = pack_group(Group(7, (make_trajectory(), make_trajectory())))
    header["members"].pop()
    with pytest.raises(ValueError, match="zip"):
        unpack_group(header, b"".join(parts))


@pytest.mark.parametrize("routed", [None, ROUTED, WIDE])
@pytest.mark.parametrize("kept", [None, KEPT])
def test_a_completion_crosses_as_it_is(kept: KeptTokens | None, routed: RoutedExperts | None) -> None:
    for versions in ((2, 2, 2), (2, 2, 3)):
        completion = Completion((5, 6, 7), (-0.1, -0.5, -1.0), versions, "length", kept, routed)
        fields, body = pack_completion(completion)
        assert unpack_completion(json.loads(json.dumps(fields)), b"".join(body)) == completion


@pytest.mark.parametrize("start", [None, 0, 17])
def test_what_a_turn_asks_for_crosses(start: int | None) -> None:
    params = SamplingParams(max_tokens=3, routed_experts_start=start)
    assert build_params(json.loads(json.dumps(describe_params(params))), str) == replace(params, stop_token_ids=())


def test_experts_cost_a_group_their_bytes() -> None:
    def measure(routed: RoutedExperts | None) -> int:
        segment = Segment("model", (1, 2), (-0.5, -0.5), (0, 0), None, routed)
        return sum(map(len, pack_group(Group(1, (Trajectory(1, (segment,), (), Stop.TERMINATED),)))[1]))

    many = RoutedExperts(array("B", [3]) * 48_000, 48, 8)
    assert measure(many) - measure(None) < 48_000 + 40


def test_a_group_that_arrived_is_read_when_it_is_looked_into() -> None:
    full = make_trajectory(rewards={"a": 0.5}, info={"x": 1}, fault=Fault("down", "it was", False))
    group = Group(7, (full, make_trajectory(rewards={"a": 1.0})))
    header, body = pack_group(group)
    arrived = take_group(json.loads(json.dumps(header)), b"".join(body))
    kinds = [type(t) for t in arrived]
    assert kinds[0] is not Trajectory
    assert [t.reward for t in arrived] == [None, 1.0]
    assert [t.stop for t in arrived.scored] == [Stop.MAX_TURNS]
    assert [type(t) for t in arrived] == kinds, "the header is enough to judge a group"
    assert arrived.trajectories[1].info == {}
    assert [type(t) for t in arrived] == [kinds[0], Trajectory]
    assert group.trajectories[0] == arrived.trajectories[0]
    assert arrived == group
    again = take_group(header, b"".join(body))
    assert replace(again.trajectories[0], timings={}) == full
    tree, tensors = encode(take_group(header, b"".join(body)))
    assert decode(tree, tensors) == group
    with pytest.raises(ValueError, match="it is no group"):
        take_group({"task": 1}, b"")
