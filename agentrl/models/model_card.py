"""Model cards: the base model, the environment, the rewards before and after. Markdown with the model hub's header."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agentrl
from agentrl.errors import UserError
from agentrl.settings.documents import read_json, read_toml_table


def format_model_card(name: str, source: str) -> str:
    """Format the card of the model ``name``, loaded from ``source``; with numbers if that is a run's folder."""
    run = Path(source).parent
    summary = _read(run / "summary.json", read_json)
    config = _read(run / "config.toml", read_toml_table)
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
            f"| {how} | {_format_reward(summary[f'{key}_before'])} | {_format_reward(summary[f'{key}_after'])} |"
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


def _read(path: Path, read: Callable[[Path], Any]) -> dict[str, Any]:
    try:
        table = read(path) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return table if isinstance(table, dict) else {}


def _format_reward(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"
