"""The state of a run goes into JSON and tensors, and comes back as it was; nothing else goes in."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.evaluation.measurement import Evaluation
from agentrl.health.monitor import HealthMonitor
from agentrl.rollout.scheduler import ScheduledGroup, SchedulerState
from agentrl.runs.overlap import PromptOverlap
from agentrl.training.plain_state import decode, encode
from agentrl.types import CallRecord, Fault, Group, KeptTokens, RoutedExperts, Segment, Stop, Trajectory


def again(value: Any) -> Any:
    tree, tensors = encode(value)
    return decode(json.loads(json.dumps(tree)), {name: t.clone() for name, t in tensors.items()})


LONG = tuple(-1 / n for n in range(1, 600))
TRAJECTORY = Trajectory(
    7,
    (
        Segment("prompt", tuple(range(500))),
        Segment("model", tuple(range(599)), LONG, (3,) * 599),
        Segment("model", (1, 2), LONG[:2], (3, 3), KeptTokens.collect([b"\1\0\0\0", b"\1\0\0\0\2\0\0\0"])),
        Segment("model", (1, 2), LONG[:2], (3, 3), None, RoutedExperts(array("B", [0, 255] * 300), 3, 2)),
        Segment("model", (1, 2), LONG[:2], (3, 3), None, RoutedExperts(array("H", [0, 65_535, 7]), 1, 1)),
    ),
    ({"role": "user", "content": "half a pair: \ud83d"},),
    Stop.FAULT,
    rewards={"a": None, "b": 0.1 + 0.2},
    calls=(CallRecord(0, "t", "ok", 1e-9),),
    fault=Fault("gone", "it is"),
)


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            1,
            2**80,
            -1,
            0.1,
            1e300,
            "text",
            [1, "a", None],
            (1, (2,)),
            {"a": [1.5]},
            {1: {2: 3}},
            set(),
            {3},
        ),
        *({"~": "tricky"}, {None: 1, (1, 2): 2}, Counter({"x": 3}), [0.1] * 1000, list(range(1000)), (2**63,) * 300),
        *({2**64 - n for n in range(1, 400)}, [2**70] * 300, [True] * 300, [1, 0.5] * 200, ["a"] * 300, [], {}),
        *(TRAJECTORY, Group(7, (TRAJECTORY, TRAJECTORY)), Stop.TERMINATED, PromptOverlap({2**63 + 1}, {3})),
        SchedulerState(
            3, [(1, ScheduledGroup(5, {"level": 2}, 8, 1))], {1: {5: 2}}, [Group(1, (TRAJECTORY,))], 0, 4, (1,)
        ),
        Evaluation(None, None, {3: (0.5,)}, {}, {3: None}, {3: ({"role": "user", "content": "a"},)}),
        HealthMonitor(True, _history=[{"a": 0.5}], _last_seen={"x": 3}, _reported={"y"}),
    ],
)
def test_plain_values_and_the_runs_own_classes_come_back_equal(value: Any) -> None:
    back = again(value)
    assert back == value
    assert type(back) is type(value)


def test_numbers_that_are_none_and_infinite_ones_come_back() -> None:
    back = again([math.nan, math.inf, -math.inf, *[math.nan] * 300])
    assert math.isnan(back[0])
    assert back[1:3] == [math.inf, -math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_tensors_come_back_with_their_type_and_shape(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 0 + 2, dtype=dtype).T
    back = again({"state": {0: {"step": torch.tensor(3.0), "m": tensor}}, "array": np.arange(3)})
    assert torch.equal(back["state"][0]["m"], tensor)
    assert back["state"][0]["m"].dtype == dtype
    assert back["state"][0]["step"].shape == ()
    assert np.array_equal(back["array"], np.arange(3))


@pytest.mark.parametrize("value", [object(), {"a": [deque([1])]}, (lambda: 1,), {"a": torch}, b"bytes"])
def test_anything_else_is_refused_by_its_class(value: Any) -> None:
    with pytest.raises(TypeError, match="a "):
        encode(value)


@pytest.mark.parametrize(
    "tree",
    [
        {"~": "os.system", "of": ["touch ran"]},
        {"~": "Trajectory", "of": {"task": 1}},
        {"~": "Stop", "of": "never"},
        {"~": "tensor", "name": "1"},
        {"~": "tuple"},
        {"~": ["tuple"], "of": []},
        {"~": "set", "of": [[]]},
        {"~": "tuple", "numbers": {"a": 1}},
    ],
)
def test_what_no_run_wrote_is_a_value_error(tree: Any) -> None:
    with pytest.raises(ValueError, match=r".*"):
        decode(tree, {})


def test_values_in_values_without_end_are_refused() -> None:
    value: list[Any] = []
    for _ in range(900):
        value = [value]
    with pytest.raises(TypeError, match="nested"):
        encode(value)
    with pytest.raises(ValueError, match="nested"):
        decode(value, {})
