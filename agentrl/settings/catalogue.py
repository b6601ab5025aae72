"""The catalogue: which settings choose an entry by name, and which settings are its parameters.

``learner.loss`` names a loss, ``learner.loss_args.tau`` is its parameter ``tau``. Some parameters have a setting of
their own, which every trainer calls alike, such as ``learner.epsilon``: it goes to whichever chosen entry declares a
parameter of that name. Defaults are always the entry's.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentrl.errors import ConfigError, UserError, author_errors
from agentrl.settings.entries import Entry
from agentrl.settings.registry import EntryKind, is_own, list_own, load_entry
from agentrl.settings.signature import convert_parameters


class _Choice(NamedTuple):
    """A setting that names an entry, and the one that holds its parameters."""

    kind: EntryKind
    section: str
    name: str
    arguments: str


_DEFAULTS: Mapping[str, str] = {"loss": "dapo", "advantage": "grpo", "importance_sampling": "token_truncate"}
CHOICES = (
    _Choice("loss", "learner", "loss", "loss_args"),
    _Choice("advantage", "learner", "advantage", "advantage_args"),
    _Choice("importance_sampling", "learner", "importance_sampling_mode", "importance_sampling_args"),
    _Choice("optimizer", "learner", "optimizer", "optimizer_args"),
    _Choice("sampler", "rollout", "sampler", "sampler_args"),
    _Choice("engine", "engine", "name", "args"),
)


@dataclass(frozen=True)
class BoundEntry:
    """An entry with all its parameters, as the settings give them; calling it calls the entry."""

    name: str
    entry: Entry
    parameters: Mapping[str, Any]

    def __call__(self, *arguments: object) -> Any:
        return self.entry.function(*arguments, **self.parameters)

    @property
    def what(self) -> str:
        """Return how a sentence calls it: ``loss 'my_losses.py:mine'``."""
        return f"{self.entry.kind.replace('_', ' ')} {self.name!r}"

    @property
    def explain(self) -> str:
        """Return its line for ``explain``."""
        return self.entry.describe(self.parameters)

    def call_safely(self, *arguments: object) -> Any:
        """Call it; what its author's code raises becomes a sentence. Raises ContractError."""
        with author_errors(self.what):
            return self(*arguments)


def shared(description: str) -> Any:
    """Make the field of a setting that goes to whichever chosen entry has a parameter of its name."""
    return pydantic.Field(None, description=description, json_schema_extra={"shared": True})


def is_shared(field: FieldInfo) -> bool:
    """Return True for a field that `shared` made."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("shared"))


def bind_entry(
    kind: EntryKind,
    name: str | Callable[..., object],
    arguments: Mapping[str, Any] | None = None,
    *,
    lenient: Mapping[str, Any] | None = None,
) -> BoundEntry:
    """Load an entry, and give it its parameters.

    Args:
        name: of the entry; or the function itself, which is called by its own name.
        arguments: by name; each must be one of the entry's.
        lenient: more of them, of which those are left out that the entry has not.

    Raises:
        UserError: there is no such entry, or a parameter is unknown, missing or wrong.
    """
    entry = load_entry(kind, name)
    more = {n: v for n, v in (lenient or {}).items() if n in entry.parameters}
    called = name if isinstance(name, str) else getattr(entry.function, "__name__", kind)
    return _bind(entry, called, {**more, **(arguments or {})}, f"{kind}_args", {})


def _bind(entry: Entry, name: str, values: Mapping[str, Any], section: str, paths: Mapping[str, str]) -> BoundEntry:
    what = f"{entry.kind.replace('_', ' ')} {name!r}"
    parameters = convert_parameters(entry.arguments, values, what, section, paths=paths)
    if entry.check is not None:
        try:
            entry.check(**parameters)
        except ValueError as error:
            raise ConfigError(f"{what}: {error}") from None
    return BoundEntry(name, entry, parameters)


def bind_choices(section: str, settings: pydantic.BaseModel, *, foreign: bool = True) -> dict[EntryKind, BoundEntry]:
    """Load the entries that a section names, by kind, with their parameters.

    Args:
        foreign: load other people's too; without, only agentrl's own are loaded and checked.

    Raises:
        UserError: an entry cannot be loaded, or a setting is unknown, missing, wrong, given twice or of no entry.
    """
    choices = [c for c in CHOICES if c.section == section]
    given = {n: getattr(settings, n) for n in _list_shared(type(settings)) if n in settings.model_fields_set}
    bound: dict[EntryKind, BoundEntry] = {}
    for choice in choices:
        name = getattr(settings, choice.name)
        if foreign or is_own(choice.kind, name):
            bound[choice.kind] = _bind_choice(choice, settings, given)
    if "loss" in bound and "importance_sampling" in bound:
        check_correction(bound["loss"], bound["importance_sampling"])
    left = [c for c in choices if c.kind not in bound]
    for name, value in given.items():
        if value is not None and not left and not any(name in b.entry.parameters for b in bound.values()):
            raise ConfigError(_explain_unheeded(section, name, bound))
    return bound


def _bind_choice(choice: _Choice, settings: pydantic.BaseModel, given: Mapping[str, Any]) -> BoundEntry:
    name, arguments = getattr(settings, choice.name), getattr(settings, choice.arguments)
    entry = load_entry(choice.kind, name)
    own = {n: v for n, v in given.items() if n in entry.parameters and (v is not None or _may_be_none(entry, n))}
    prefix = f"{choice.section}.{choice.arguments}"
    if twice := sorted(own.keys() & arguments.keys()):
        raise ConfigError(
            f"{twice[0]} is given twice: {choice.section}.{twice[0]} and {prefix}.{twice[0]} are the same"
        )
    paths = {n: f"{choice.section}.{n}" for n in _list_shared(type(settings)) if n not in arguments}
    return _bind(entry, name, {**own, **arguments}, prefix, paths)


def describe_algorithm(config: pydantic.BaseModel) -> dict[str, Any]:
    """Describe the entries that a config names, as JSON: what a reader of the run needs, who runs none of their code.

    Raises:
        UserError: as `bind_choices`.
    """
    sections = dict.fromkeys(c.section for c in CHOICES)
    bound = [b for section in sections for b in bind_choices(section, getattr(config, section)).items()]
    return {kind: _describe_bound(kind, own) for kind, own in bound}


def _describe_bound(kind: EntryKind, bound: BoundEntry) -> dict[str, Any]:
    entry = bound.entry
    parameters = {
        name: {"value": _as_json(bound.parameters[name]), "description": field.description or ""}
        for name, field in entry.parameters.items()
    }
    described: dict[str, Any] = {"name": bound.name, "explain": bound.explain, "parameters": parameters}
    if kind == "loss":
        described["reduction"] = entry.reduction
        described["metrics"] = {name: asdict(m) for name, m in entry.metrics.items()}
    if not is_own(kind, bound.name):
        described["source"] = _fingerprint(entry)
    return described


def describe_own_entry(kind: EntryKind, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the entry that a run's settings name, if it is agentrl's own; only its name if not.

    Args:
        settings: tables in tables, as the TOML file has them.
    """
    choice = next(c for c in CHOICES if c.kind == kind)
    section = settings.get(choice.section)
    section = section if isinstance(section, Mapping) else {}
    name = str(section.get(choice.name, _DEFAULTS.get(kind, "")))
    if not is_own(kind, name):
        return {"name": name}
    own = section.get(choice.arguments)
    try:
        return _describe_bound(kind, bind_entry(kind, name, own if isinstance(own, Mapping) else {}, lenient=section))
    except UserError:  # another version's
        return {"name": name}


def _as_json(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _fingerprint(entry: Entry) -> str:
    """Return a checksum of the file that an entry is written in; empty if it is in none."""
    try:
        path = inspect.getsourcefile(inspect.unwrap(entry.function))
        return hashlib.sha256(Path(path or "").read_bytes()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


def check_correction(loss: BoundEntry, rule: BoundEntry) -> None:
    """Raise ConfigError if a loss that sums the corrections of tokens gets those of rows."""
    if loss.entry.corrects and rule.entry.by_row:
        raise ConfigError(f"importance_sampling_mode {rule.name} is by row; {loss.name} sums the corrections of tokens")


def _may_be_none(entry: Entry, name: str) -> bool:
    """Return True if None is a value of a parameter, and not only its default."""
    try:
        annotation: Any = entry.parameters[name].annotation
        pydantic.TypeAdapter(annotation).validate_python(None)
    except pydantic.ValidationError:
        return False
    return True


def _list_shared(section: type[pydantic.BaseModel]) -> list[str]:
    return [name for name, field in section.model_fields.items() if is_shared(field)]


def list_unbounded(section: str, settings: pydantic.BaseModel) -> list[str]:
    """List the settings of a section that are None where the default of their entry is another value.

    Raises:
        UserError: as `bind_choices`.
    """
    names = [n for n in _list_shared(type(settings)) if n in settings.model_fields_set and getattr(settings, n) is None]
    bound = bind_choices(section, settings).values() if names else ()
    owners = [(n, b.entry.parameters[n], b.parameters[n]) for b in bound for n in names if n in b.entry.parameters]
    return [name for name, field, value in owners if value is None and field.default is not None]


def _explain_unheeded(section: str, name: str, bound: Mapping[EntryKind, BoundEntry]) -> str:
    """Say whose a setting is that none of the chosen entries has."""
    having = find_entries(section, name)
    if not having:
        return f"{section}.{name} is for an entry with a parameter of that name; none of those chosen has it"
    (kind, names), *_ = having.items()
    plural = f"the {_plural(kind)}" if len(names) > 1 else f"the {kind.replace('_', ' ')}"
    return f"{section}.{name} is for {plural} {', '.join(names)}; {bound[kind].name} has no such parameter"


def _plural(kind: str) -> str:
    return "losses" if kind == "loss" else f"{kind.replace('_', ' ')}s"


def find_entries(section: str, name: str) -> dict[EntryKind, list[str]]:
    """Find agentrl's own entries that have a parameter of a name, by kind."""
    having: dict[EntryKind, list[str]] = {}
    for choice in CHOICES:
        own = [n for n, entry in list_own_entries(choice.kind) if name in entry.parameters]
        if own and choice.section == section:
            having[choice.kind] = own
    return having


def list_own_entries(kind: EntryKind) -> Iterator[tuple[str, Entry]]:
    """Yield agentrl's own entries of a kind, by name."""
    return ((name, load_entry(kind, name)) for name in list_own(kind))


def describe_shared(section: str, fields: Mapping[str, FieldInfo]) -> dict[str, FieldInfo]:
    """Return a section's fields; those that are parameters of entries with their default and their owners' names."""
    return {name: _complete(section, name, field) for name, field in fields.items()}


def _complete(section: str, name: str, field: FieldInfo) -> FieldInfo:
    having = find_entries(section, name) if is_shared(field) else {}
    if not having:
        return field
    (kind, names), *_ = having.items()
    default = load_entry(kind, names[0]).parameters[name].default
    owners = "" if len(names) == sum(1 for _ in list_own_entries(kind)) else f"; of {', '.join(names)}"
    return FieldInfo(
        annotation=field.annotation,
        default=None if default is PydanticUndefined else default,
        description=f"{field.description}{owners}",
    )


def check_entries(section: str, settings: pydantic.BaseModel) -> None:
    """Check the parameters of agentrl's own entries. Raises ValueError. Others are loaded when they are used."""
    try:
        bind_choices(section, settings, foreign=False)
    except UserError as error:
        raise ValueError(str(error)) from None
