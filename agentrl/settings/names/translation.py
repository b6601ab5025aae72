"""Names of TRL, verl and vLLM looked up in the table, and their values translated to settings here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from agentrl.errors import ConfigError
from agentrl.settings.names.foreign import ForeignName
from agentrl.settings.names.training_arguments import TRAINING_FIELDS
from agentrl.settings.names.trl import GRPO_FIELDS, OLDER_FIELDS, SCRIPT_ARGUMENTS, TRAINER_ARGUMENTS
from agentrl.settings.names.trl_rules import TRL_RULES
from agentrl.settings.names.values import JointRule, Settings, Values
from agentrl.settings.names.verl import VERL_NAMES
from agentrl.settings.names.verl_rules import VERL_RULES
from agentrl.settings.names.vllm import VLLM_NAMES

TABLE: Mapping[str, tuple[ForeignName, ...]] = {  # by library; the first that has a name counts
    "TRL": (*TRAINING_FIELDS, *GRPO_FIELDS, *OLDER_FIELDS, *SCRIPT_ARGUMENTS, *TRAINER_ARGUMENTS),
    "vLLM": VLLM_NAMES,
    "verl": VERL_NAMES,
}
RULES: Sequence[JointRule] = (*TRL_RULES, *VERL_RULES)
_IN_PEFT = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
_IN_PEFT |= {"target_parameters": "lora_target_parameters", "task_type": "lora_task_type"}
_PARTS = {  # names whose value is a table of names
    "peft_config": _IN_PEFT,
    "quantization_config": {},
    "model_init_kwargs": {"dtype": "torch_dtype", "revision": "model_revision"},
    "generation_kwargs": {},
}
_NEUTRAL = {"bias": "none", "inference_mode": False, "do_sample": True, "num_beams": 1, "low_cpu_mem_usage": True}


@dataclass
class Translation:
    """Foreign names as settings here.

    Args:
        settings: by dotted name.
        origins: the names that each setting was made of.
        remarks: names for which nothing has to be set, and why.
        refused: names for what is not here, or values without a counterpart, and why.
    """

    settings: Settings = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def set(self, setting: str, value: object, *names: str) -> None:
        """Add a setting. One that another name has made already is refused."""
        before = self.origins.get(setting, ())
        if before and before != names and self.settings[setting] != value:
            self.refused[names[0]] = f"{setting} is given by {' and '.join(before)} too, as {self.settings[setting]!r}"
            return
        self.settings[setting] = value
        self.origins[setting] = names


def find_name(name: str) -> ForeignName | None:
    """Return the entry of a name; of verl's also by the end of its path. None if there is none."""
    return _by_name().get(name.replace("-", "_"))


def list_hints() -> dict[str, str]:
    """Return the settings here by the names of other libraries, for hints."""
    return {name: entry.setting for name, entry in _by_name().items() if entry.setting}


@cache
def list_joint_inputs() -> frozenset[str]:
    """Return the names that some rule reads beside its own."""
    return frozenset(name for rule in RULES for name in rule.reads)


@cache
def _by_name() -> dict[str, ForeignName]:
    names: dict[str, ForeignName] = {}
    for entry in (e for entries in TABLE.values() for e in entries):
        names.setdefault(entry.name, entry)
    ends: dict[str, list[ForeignName]] = {}
    for entry in VERL_NAMES:
        parts = entry.name.split(".")
        for start in range(1, len(parts)):
            ends.setdefault(".".join(parts[start:]), []).append(entry)
    for end, entries in ends.items():
        if len(entries) == 1 and ("." in end or "_" in end):
            names.setdefault(end, entries[0])
    return names


def translate(
    values: Mapping[str, object],
    explicit: frozenset[str],
    *,
    known: Mapping[str, object] | None = None,
    processes: int = 1,
) -> Translation:
    """Translate the values of names of the table.

    Args:
        values: by name.
        explicit: the names that somebody gave; the others are a library's defaults.
        known: further values that rules may read, by name: of settings here that stand for the name.
        processes: that train together.
    """
    done = Translation()
    values, explicit = _expand(values, explicit, done)
    named = {entry.name: (name, value) for name, value in values.items() if (entry := find_name(name)) is not None}
    for name, value in values.items():
        _translate_one(name, _read_value(value), explicit, done)
    context = {**(known or {}), **{canonical: _read_value(value) for canonical, (_, value) in named.items()}}
    given = frozenset(entry.name for name in explicit if (entry := find_name(name)) is not None)
    reader = Values(context, {entry.name: entry.default for entry in _by_name().values()}, given, processes)
    for rule in RULES:
        if asked := [n for n in rule.names if n in named]:
            _apply(rule, reader, [named[n][0] for n in asked if n in given] or [named[asked[0]][0]], done)
    return done


def _translate_one(name: str, value: object, explicit: frozenset[str], done: Translation) -> None:
    entry = find_name(name)
    if entry is None or entry.joint:
        return
    if entry.kind == "nothing":
        if name in explicit:
            done.remarks[name] = entry.note
    elif entry.kind == "absent":
        if not entry.asks_for_nothing(value):
            done.refused[name] = entry.note
        elif name in explicit:
            done.remarks[name] = "this is how it is here"
    elif value is None:
        if name in explicit:
            done.remarks[name] = f"the default of {entry.setting} holds"
    else:
        try:
            done.set(entry.setting, entry.convert(value) if entry.convert else value, name)
        except ValueError as error:
            done.refused[name] = str(error)


def _apply(rule: JointRule, values: Values, names: Sequence[str], done: Translation) -> None:
    try:
        for setting, value in rule.translate(values).items():
            if value is not None:
                done.set(setting, value, *names)
    except ConfigError as error:
        name, _, why = str(error).partition(": ")
        done.refused[name] = why


def _expand(
    values: Mapping[str, object], explicit: frozenset[str], done: Translation
) -> tuple[dict[str, object], frozenset[str]]:
    """Replace tables of names, such as a ``peft_config``, by the names that are in them."""
    expanded: dict[str, object] = {}
    more: set[str] = set()
    for name, value in values.items():
        if name not in _PARTS or value is None:
            expanded[name] = value
            continue
        if (table := _read_table(value)) is None:
            done.refused[name] = f"a table of names, not {value!r:.80}"
            continue
        if name == "peft_config":
            expanded["use_peft"] = True
        for key, part in table.items():
            inner = _PARTS[name].get(key, key)
            if find_name(inner) is not None:
                expanded[inner] = part
                more |= {inner} if name in explicit else set()
            elif part != _NEUTRAL.get(key):
                done.refused[f"{name}.{key}"] = "there is no such setting here"
    return expanded, (explicit | more)


def _read_table(value: object) -> dict[str, object] | None:
    """Return a table, or the attributes of an object that are not its class's defaults; None if it is neither."""
    if isinstance(value, Mapping):
        return {str(k): v for k, v in value.items()}
    try:
        usual = vars(type(value)())
        always = ("r", "lora_alpha", "target_modules", "load_in_4bit", "load_in_8bit")
        return {k: v for k, v in vars(value).items() if not k.startswith("_") and (k in always or v != usual.get(k))}
    except TypeError:
        return None


def _read_value(value: object) -> object:
    """Return a value as typed in other libraries' ways: ``True``, ``None`` and ``1e-6`` as text are what they say."""
    if not isinstance(value, str):
        return value
    words: dict[str, object] = {"true": True, "false": False, "null": None}
    if value.lower() in words:
        return words[value.lower()]
    if value == "None":
        return None
    return float(value) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", value) else value
