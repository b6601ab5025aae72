"""A plan as TOML that ``agentrl train`` reads, with the words beside it as comments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import tomli_w

from agentrl.errors import ConfigError
from agentrl.migration.plan import UNKNOWN, Plan
from agentrl.settings.loader import build_config, list_settings
from agentrl.settings.names.training_arguments import TRAINING_FIELDS
from agentrl.settings.names.translation import Translation, translate
from agentrl.settings.names.trl import GRPO_FIELDS

_DEFAULTS = {entry.name: entry.default for entry in (*TRAINING_FIELDS, *GRPO_FIELDS)}
_IMMATERIAL = {  # TRL's defaults that do not change what is learned
    *("run.dir", "run.project", "run.resume", "run.save_every", "run.trackers", "learner.gradient_checkpointing"),
}
_CORRECTION = ("importance_sampling_mode", "importance_sampling_max", "importance_sampling_min")


def format_plan(plan: Plan) -> str:
    """Format a plan as TOML. What is left for a person to do is added to ``plan.todo``."""
    done = _translate(plan)
    settings = _choose(plan, done) | plan.settings
    reasons = {s: _name_origin(plan, names) for s, names in done.origins.items()} | plan.reasons
    plan.todo += [f"{name}: {why}" for name, why in _list_contradictions(done)]
    if problem := _find_problem(settings):
        plan.todo.append(problem)
    lines = [f"# From {plan.source}, by agentrl from-trl. What stands behind a setting is TRL's name for it."]
    lines += _comment("TODO", plan.todo)
    lines += _comment("Not here", [f"{name}: {why}" for name, why in _list_absent(plan, done)])
    lines += _comment("Note", plan.notes)
    lines += _comment("Nothing to set", [f"{name}: {why}" for name, why in done.remarks.items()])
    return "\n".join([*lines, "", *_format_settings(settings, reasons)]) + "\n"


def _translate(plan: Plan) -> Translation:
    given = {name: value for name, value in plan.values.items() if value is not None}
    defaults = dict(_DEFAULTS)
    if not given.keys() & {"bf16", "fp16", "torch_dtype", "model_init_kwargs"}:
        defaults["bf16"] = True  # TRL's, where neither is given
    if not given.get("use_vllm"):
        defaults = {n: v for n, v in defaults.items() if not n.startswith("vllm_")}
    return translate({**defaults, **given}, frozenset(given), processes=plan.processes)


def _choose(plan: Plan, done: Translation) -> dict[str, object]:
    """Return the settings to write: those that were given, and TRL's defaults that differ from agentrl's and matter."""
    known = list_settings()
    chosen: dict[str, object] = {}
    for setting, value in done.settings.items():
        given = any(name in plan.values or _is_part(name, plan) for name in done.origins[setting])
        ours = known[setting].default if setting in known else None
        same = value == ours or (isinstance(ours, tuple) and isinstance(value, list) and tuple(value) == ours)
        if given or not (same or setting in _IMMATERIAL):
            chosen[setting] = value
    return chosen


def _is_part(name: str, plan: Plan) -> bool:
    """Return True for a name that came within a table, such as peft_config."""
    return name not in _DEFAULTS and name not in plan.values


def _name_origin(plan: Plan, names: Sequence[str]) -> str:
    given = [n for n in names if n in plan.values or _is_part(n, plan)]
    return ", ".join(given) if given else f"TRL's default: {', '.join(names)}"


def _list_contradictions(done: Translation) -> Iterator[tuple[str, str]]:
    """Yield what TRL would not take either, or what has to be decided: values that leave a setting open."""
    joint = ("per_device_train_batch_size", "generation_batch_size", "gradient_accumulation_steps")
    return ((n, why) for n, why in done.refused.items() if n.partition(" ")[0] in joint)


def _list_absent(plan: Plan, done: Translation) -> Iterator[tuple[str, str]]:
    todo = dict(_list_contradictions(done))
    for name, why in done.refused.items():
        if name not in todo:
            value = f" = {plan.values[name]!r:.80}" if name in plan.values else ""
            yield f"{name}{value}", why


def _find_problem(settings: Mapping[str, object]) -> str:
    """Return a sentence where agentrl would refuse the settings together; an empty text where it takes them."""
    try:
        build_config(("this file", _nest(settings)))
    except ConfigError as error:
        return str(error)
    return ""


def _nest(settings: Mapping[str, object]) -> dict[str, object]:
    nested: dict[str, object] = {}
    for name, value in settings.items():
        *parents, last = name.split(".")
        table = nested
        for parent in parents:
            table = table.setdefault(parent, {})  # type: ignore[assignment]
        table[last] = value
    return nested


def _comment(title: str, words: Sequence[str]) -> list[str]:
    return [f"# {title}: {_make_printable(text)}" for text in dict.fromkeys(words)]


def _make_printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _format_settings(settings: Mapping[str, object], reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of settings: those of no section first, then each section."""
    sections: dict[str, list[str]] = {"": []}
    for name, value in settings.items():
        section, dot, inner = name.partition(".")
        if not dot:
            section, inner = "", name
        reason = reasons.get(name, "")
        mark = "TODO" if UNKNOWN in str(value) else _make_printable(reason)
        sections.setdefault(section, []).append(f"{inner} = {_format_value(value)}" + f"  # {mark}" * bool(mark))
    for section in ("", "env", *(s for s in sections if s not in ("", "env"))):
        if lines := sections.get(section):
            yield from ([f"[{section}]"] if section else [])
            yield from lines
            yield ""


def _format_value(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_format_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_format_key(str(k))} = {_format_value(v)}" for k, v in value.items()) + "}"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def _format_key(key: str) -> str:
    return tomli_w.dumps({key: 0}).partition(" = ")[0]
