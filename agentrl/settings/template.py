"""The settings ``template.*``: ``history``, and any word that the model's chat template reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator

from agentrl.errors import suggest

History = Literal["as_sampled", "as_template"]
HISTORY = "history"


def _check_history(words: dict[str, Any]) -> dict[str, Any]:
    value, known = words.get(HISTORY, "as_sampled"), get_args(History)
    if value not in known:
        raise ValueError(f"history is {str(value)!r:.80}; it is one of {', '.join(known)}{suggest(str(value), known)}")
    return words


TemplateSettings = Annotated[dict[str, Any], AfterValidator(_check_history)]
