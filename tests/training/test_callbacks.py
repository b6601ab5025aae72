"""Callbacks: several hear the same, and a method that nobody would call is refused."""

from __future__ import annotations

import pytest

from agentrl.errors import ContractError
from agentrl.training.callbacks import Callback, Callbacks


class Heard(Callback):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_message(self, text: str) -> None:
        self.texts.append(text)


def test_several_callbacks_hear_the_same() -> None:
    one, other = Heard(), Heard()
    both = Callbacks([one, other])
    both.on_message("a")
    both.on_phase("learn", 0)
    assert one.texts == other.texts == ["a"]


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(ContractError, match=r"subclasses of agentrl\.training\.callbacks\.Callback, not <class"):
        Callbacks([Heard])  # type: ignore[list-item]


def test_a_method_that_nobody_would_call_is_refused_with_the_nearest_name() -> None:
    misspelt = type("Mine", (Callback,), {"on_steps": lambda self: None})
    with pytest.raises(ContractError, match=r"Mine.on_steps: there is no such callback; did you mean 'on_step'\?"):
        Callbacks([misspelt()])


def test_an_async_method_is_refused_when_it_is_called() -> None:
    async def on_message(self: Callback, text: str) -> None: ...

    callback = Callbacks([type("Mine", (Callback,), {"on_message": on_message})()])
    with pytest.raises(ContractError, match=r"Mine.on_message must be a plain `def`, not `async def`"):
        callback.on_message("a")
