"""The table of names as it stands in the documentation: ``python -m agentrl.settings.names.page`` writes it anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.settings.loader import list_settings
from agentrl.settings.names.foreign import ForeignName
from agentrl.settings.names.training_arguments import TRAINING_FIELDS
from agentrl.settings.names.trl import GRPO_FIELDS, OLDER_FIELDS, SCRIPT_ARGUMENTS, TRAINER_ARGUMENTS
from agentrl.settings.names.verl import VERL_NAMES
from agentrl.settings.names.vllm import VLLM_NAMES

BEGIN, END = "<!-- names: generated -->", "<!-- names: end -->"
_DOCS = Path(__file__).parents[3] / "docs"
_FIELDS = (*GRPO_FIELDS, *TRAINING_FIELDS)


def format_trl() -> str:
    """Format TRL's names: settings with both defaults, what needs no setting, what is not here."""
    more = (*TRAINER_ARGUMENTS, *SCRIPT_ARGUMENTS, *OLDER_FIELDS)
    parts = [
        "### Settings",
        "\n".join(_format_settings("TRL's `GRPOConfig`", _FIELDS)),
        "### Nothing to set",
        "\n".join(_format_reasons("TRL's `GRPOConfig`", "why", _pick(_FIELDS, "nothing"))),
        "### Not here",
        "A value that asks for nothing, the default, is accepted.",
        "\n".join(_format_reasons("TRL's `GRPOConfig`", "why, and the way out", _pick(_FIELDS, "absent"))),
        "### Arguments of GRPOTrainer, of `trl grpo`, and fields of earlier releases",
        "\n".join(_format_both("TRL's", more)),
    ]
    return "\n\n".join(parts)


def format_verl() -> str:
    """Format verl's and vLLM's names."""
    parts = ["### verl", "\n".join(_format_both("verl's", VERL_NAMES))]
    return "\n\n".join([*parts, "### vLLM", "\n".join(_format_both("vLLM's", VLLM_NAMES))])


def insert(page: str, table: str) -> str:
    """Return a page with the table between its two marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def _pick(names: Sequence[ForeignName], kind: str) -> list[ForeignName]:
    return [name for name in names if name.kind == kind]


def _format_settings(title: str, names: Sequence[ForeignName]) -> Iterator[str]:
    known = list_settings()
    yield f"| {title} | here | there, by default | here, by default |"
    yield "|---|---|---|---|"
    for name in _pick(names, "setting"):
        ours = str(known[name.setting].default) if name.setting in known else "None"
        yield f"| `{name.name}` | {_describe(name)} | {_format_default(name.default)} | {ours} |"


def _format_reasons(title: str, what: str, names: Sequence[ForeignName]) -> Iterator[str]:
    """Yield a table of reasons, names of the same reason in one line."""
    yield f"| {title} | {what} |"
    yield "|---|---|"
    reasons: dict[str, list[str]] = {}
    for name in names:
        reasons.setdefault(name.note, []).append(f"`{name.name}`")
    for reason, same in reasons.items():
        yield f"| {', '.join(same)} | {_escape(reason)} |"


def _format_both(title: str, names: Sequence[ForeignName]) -> Iterator[str]:
    yield f"| {title} | here |"
    yield "|---|---|"
    for name in names:
        word = {"setting": "", "nothing": "nothing to set: ", "absent": "not here: "}[name.kind]
        said = _describe(name) if name.kind == "setting" else _escape(name.note)
        yield f"| `{name.name}` | {word}{said} |"


def _describe(name: ForeignName) -> str:
    note = f"{',' if name.note.startswith(('and ', 'in ', 'of ', 'with ')) else ':'} {name.note}" if name.note else ""
    return f"`{name.setting}`{_escape(note)}"


def _format_default(default: object) -> str:
    return str(default) if default != "" else "`''`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def write_pages() -> None:
    """Write the tables of docs/from-trl.md and docs/from-verl.md."""
    for file, table in (("from-trl.md", format_trl()), ("from-verl.md", format_verl())):
        page = _DOCS / file
        page.write_text(insert(page.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    write_pages()
