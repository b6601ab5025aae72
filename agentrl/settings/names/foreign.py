"""A name of another library's, and what stands for it here: a setting, nothing to set, or a reason why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["setting", "nothing", "absent"]
Convert = Callable[[object], object]


@dataclass(frozen=True)
class ForeignName:
    """An entry of the table.

    Args:
        name: as the library writes it, with dots where it does.
        kind: ``setting``: a setting here; ``nothing``: accepted, nothing has to be set; ``absent``: refused.
        default: the library's own default; an absent name that has it asks for nothing, and is accepted.
        setting: the dotted name here.
        note: how the value is translated; why there is nothing to set; or why it is not here, and the way out.
        convert: the value there to the value here. Raises ValueError with the reason where there is no such value.
        joint: the value is translated together with others, by a rule of `agentrl.settings.names.rules`.
        harmless: further values of an absent name that ask for nothing.
    """

    name: str
    kind: Kind
    default: object = None
    setting: str = ""
    note: str = ""
    convert: Convert | None = None
    joint: bool = False
    harmless: tuple[object, ...] = ()

    def asks_for_nothing(self, value: object) -> bool:
        """Return True where an absent name has a value that leaves everything as it is here."""
        return value is None or any(value == quiet and type(value) is type(quiet) for quiet in self._quiet)

    @property
    def _quiet(self) -> tuple[object, ...]:
        return (self.default, *_spell_number(self.default), *self.harmless)


def _spell_number(value: object) -> tuple[object, ...]:
    """Return 1 and 1.0 for either of them; nothing for what is no whole number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        return ()
    return (int(value), float(value))


def here(name: str, default: object, setting: str, note: str = "", convert: Convert | None = None) -> ForeignName:
    """Return the entry of a name whose value is one setting's here, as it is or converted."""
    return ForeignName(name, "setting", default, setting, note, convert)


def joint(name: str, default: object, setting: str, note: str = "") -> ForeignName:
    """Return the entry of a name that makes a setting together with others."""
    return ForeignName(name, "setting", default, setting, note, joint=True)


def nothing(name: str, default: object, why: str) -> ForeignName:
    """Return the entry of a name for which nothing has to be set."""
    return ForeignName(name, "nothing", default, note=why)


def absent(name: str, default: object, why: str, *harmless: object) -> ForeignName:
    """Return the entry of a name for something that is not here."""
    return ForeignName(name, "absent", default, note=why, harmless=harmless)
