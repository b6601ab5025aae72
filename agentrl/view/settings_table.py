"""The settings of runs as a table: what each was made of, what is no default, what differs between them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from agentrl.layers import flatten, known_settings
from agentrl.view.store import Store

LONGEST = 2_000  # characters of a value
OWN = ("run.dir", "run.resume")  # other in every run


class Setting(NamedTuple):
    """``values`` are one a run, as JSON; None where a run's file does not say, which means the default.

    ``default`` is None where it is not known here: an environment's or a tool's own setting.
    """

    name: str
    default: str | None
    values: list[str | None]
    changed: bool  # no default, in one of the runs at least
    differs: bool  # between the runs


def compare_settings(stores: Sequence[Store]) -> list[Setting]:
    """Return every setting of the runs' config.toml, in the order of ``agentrl train --help``, then the others."""
    defaults = {name: _text(_default(field)) for name, field in known_settings().items()}
    runs = [{name: _text(value) for name, value in flatten(store.config).items()} for store in stores]
    named = dict.fromkeys(name for values in runs for name in values)
    order = [*(n for n in named if n.startswith(("env.", "tool."))), *(n for n in defaults if n in named)]
    order += [n for n in named if n not in order]
    return [_setting(name, defaults.get(name), [values.get(name) for values in runs]) for name in order]


def _setting(name: str, default: str | None, values: list[str | None]) -> Setting:
    known = [v if v is not None else default for v in values]
    return Setting(
        name,
        default,
        values,
        changed=name not in OWN and name in known_settings() and any(v != default for v in known),
        differs=name not in OWN and len(set(known)) > 1,
    )


def _default(field: Any) -> Any:
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _text(value: Any) -> str | None:
    """Write a value as JSON, cut where it is long."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
