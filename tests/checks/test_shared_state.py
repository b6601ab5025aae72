"""Snapshots of what outlives an episode."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentrl.checks.shared_state import _freeze, find_changes, take_snapshot


class Box:
    """Holds something."""

    inside: Any = None
    items: list[int] = []
    _counted: Any = Counter()

    def put(self, value: int, into: list[int] = []) -> None:  # noqa: B006 - what a user does
        into.append(value)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [1, [2]], lambda v: v[1].append(3)),
        (lambda: {"a": {"b": 1}}, lambda v: v["a"].update(b=2)),
        (lambda: {1, 2}, lambda v: v.add(3)),
        (lambda: deque([1]), lambda v: v.append(2)),
        (lambda: Counter("a"), lambda v: v.update("a")),
        (lambda: random.Random(1), lambda v: v.random()),
        (lambda: np.zeros(3), lambda v: v.fill(1)),
        (lambda: itertools.count(), lambda v: next(v)),
        (Box, lambda v: setattr(v, "inside", 1)),
    ],
)
def test_a_change_is_seen(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    value = make()
    before = _freeze(value)
    assert _freeze(value) == before == _freeze(make())
    change(value)
    assert _freeze(value) != before


def test_what_refers_to_itself_ends() -> None:
    value: list[Any] = [float("nan")]
    value.append(value)
    assert _freeze(value) == _freeze(value)


def test_what_is_large_is_not_looked_through() -> None:
    _freeze([[i] for i in range(200_000)])


def test_names_tell_where_it_is() -> None:
    before = take_snapshot([Box])
    Box().put(1)
    Box.items.append(1)
    Box.new = 1  # type: ignore[attr-defined]
    after = take_snapshot([Box])
    del Box.new  # type: ignore[attr-defined]
    Box.items.clear()
    assert find_changes(before, after) == ["Box.items", "Box.new", "the defaults of Box.put"]
