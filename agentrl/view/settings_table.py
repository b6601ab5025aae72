"""The settings of runs as a table: each run's values, those that are not the default, those that differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentrl.evaluation.scope import EvaluationScope, is_setting_used
from agentrl.settings.loader import flatten, list_settings
from agentrl.view.evaluation_findings import find_scope
from agentrl.view.store import Store

LONGEST = 2_000  # characters of a value
OWN = ("run.dir", "run.resume")  # other in every run
EVALUATED = ("split", "first", "tasks", "greedy", "endpoint")  # options of `agentrl eval` that are in no config.toml


class _SettingRow(NamedTuple):
    """A setting. ``values``: one a run, as JSON; None if a run's file lacks it, which means the default.

    ``default`` is None if it is not known here: an environment's or a tool's own setting.
    """

    name: str
    default: str | None
    values: list[str | None]
    used: list[bool]  # by each run: an evaluation heeds no settings of the learner
    changed: bool  # no default, in one of the runs at least
    differs: bool  # between the runs that heed it
    shown: bool  # in the short list


def compare_settings(stores: Sequence[Store]) -> list[_SettingRow]:
    """Return every setting that a run uses, in the order of ``agentrl train --help``, then the others."""
    scopes = [find_scope(store.folder) for store in stores]
    defaults = {name: _text(_default(field)) for name, field in list_settings().items()}
    defaults |= {name: _text(EvaluationScope._field_defaults[name]) for name in EVALUATED}
    runs = [_read(store, scope) for store, scope in zip(stores, scopes, strict=True)]
    named = dict.fromkeys(name for values in runs for name in values)
    first = [*(n for n in named if n.startswith(("env.", "tool."))), *(n for n in EVALUATED if n in named)]
    order = [*first, *(n for n in defaults if n in named and n not in first)]
    order += [n for n in named if n not in order]
    rows = (_setting(name, defaults.get(name), runs, [_is_used(name, s) for s in scopes]) for name in order)
    return [row for row in rows if any(row.used)]


def _read(store: Store, scope: EvaluationScope | None) -> dict[str, str | None]:
    """Read a run's settings; those of an evaluation that are in no config.toml too."""
    values = {name: _text(value) for name, value in flatten(store.config).items()}
    return values if scope is None else values | {name: _text(getattr(scope, name)) for name in EVALUATED}


def _is_used(name: str, scope: EvaluationScope | None) -> bool:
    if name in EVALUATED:
        return scope is not None and (name != "endpoint" or bool(scope.endpoint))
    return scope is None or is_setting_used(scope, name)


def _setting(name: str, default: str | None, runs: Sequence[Mapping[str, str | None]], used: list[bool]) -> _SettingRow:
    values = [values.get(name) for values in runs]
    known = [default if v is None else v for v, acts in zip(values, used, strict=True) if acts]
    changed = name not in OWN and name in list_settings() and any(v != default for v in known)
    differs = name not in OWN and len(set(known)) > 1
    always = name == "model" or name in EVALUATED or (default is None and name.startswith(("env.", "tool.")))
    return _SettingRow(name, default, values, used, changed, differs, changed or differs or always)


def _default(field: Any) -> Any:
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _text(value: Any) -> str | None:
    """Write a value as JSON, cut where it is long."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
