"""A model's card: what it is, what it was trained on, what came of it. Markdown with the model hub's header."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import agentrl


def card(name: str, source: str) -> str:
    """The card of the model ``name``, found in the folder ``source``: with numbers where that is a run's."""
    run = Path(source).parent
    summary = _read(run / "summary.json", json.loads)
    config = _read(run / "config.toml", tomllib.loads)
    base = config.get("model", source)
    header = {"library_name": "transformers", "tags": ["agentrl", "reinforcement-learning", "tool-use"]}
    if base.count("/") == 1 and not Path(base).exists():
        header["base_model"] = base  # a name on the hub
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items()), "---", "", f"# {name}", ""]
    if not summary:
        return "\n".join([*lines, f"A copy of `{base}`, written by agentrl {agentrl.__version__}.", ""])
    lines += [
        f"`{base}`, trained with agentrl {agentrl.__version__} for "
        f"{summary['steps']} steps on the environment `{summary['env']}`.",
        "",
        "| held-out reward | before | after |",
        "|---|---|---|",
        *(
            f"| {how} | {_number(summary[f'{key}_before'])} | {_number(summary[f'{key}_after'])} |"
            for how, key in (("sampled", "reward"), ("greedy", "greedy"))
        ),
        "",
        f"{summary['sampled_tokens']:,} tokens were sampled. The settings:",
        "",
        "```toml",
        (run / "config.toml").read_text(encoding="utf-8").strip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _read(path: Path, parse: Any) -> dict[str, Any]:
    found: dict[str, Any] = parse(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"
