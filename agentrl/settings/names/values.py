"""The values that a rule of several names reads: given, or by default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentrl.errors import ConfigError

Settings = dict[str, object]


@dataclass(frozen=True)
class Values:
    """The values of a library's names: what was given, else the library's defaults.

    Args:
        given: by name; a name of which the setting here was given counts too.
        explicit: the names that were given, and not filled in from the defaults.
        processes: that train together.
    """

    given: Mapping[str, object]
    defaults: Mapping[str, object]
    explicit: frozenset[str]
    processes: int = 1

    def __getitem__(self, name: str) -> object:
        return self.given[name] if name in self.given else self.defaults[name]

    def number(self, name: str) -> float:
        """Return a number. Raises ConfigError where the value is none."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name}: a number, not {value!r}")
        return value

    def whole(self, name: str) -> int:
        """Return a positive whole number. Raises ConfigError where the value is none."""
        number = self.number(name)
        if number != int(number) or number < 1:
            raise ConfigError(f"{name}: a whole number from 1 on, not {number!r}")
        return int(number)


@dataclass(frozen=True)
class JointRule:
    """Settings that several names make, where one of ``names`` is given; ``reads`` are looked at beside them."""

    names: tuple[str, ...]
    translate: Callable[[Values], Settings]
    reads: tuple[str, ...] = ()
