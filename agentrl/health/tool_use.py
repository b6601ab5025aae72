"""The use of tools in an evaluation: a model that talks past its tools is told of at once, with what to do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from agentrl.types import Trajectory

_SHOWN = 80  # characters of a turn
LEAST = 8  # episodes, below which nothing is said
_FORMS: Mapping[str, str] = MappingProxyType(  # how models write calls, by what they begin with
    {
        "<tool_call>{JSON}": r"<tool_call",
        "<function=NAME>": r"<function=",
        "[TOOL_CALLS]": r"\[TOOL_CALLS\]",
        "<|python_tag|>": r"<\|python_tag\|>",
        "harmony's to=functions.NAME": r"to=functions\.",
        "<|tool_call...": r"<\|tool_call|<｜tool▁call",
        "<arg_key>": r"<arg_key>",
        "<invoke name=...>": r"<invoke name=|<｜DSML｜",
        "<start_function_call>": r"<start_function_call>",
        "```tool_code": r"```tool_code",
        "JSON with a name and arguments": r"\"name\"\s*:\s*\"[^\"]+\"\s*,\s*\"(?:arguments|parameters)\"",
        "[NAME(ARGUMENT=VALUE)]": r"^\s*\[\w+\(\w+\s*=",
    }
)
_ANY_FORM = re.compile("|".join(f"({pattern})" for pattern in _FORMS.values()), re.MULTILINE)


def find_call_form(text: str) -> tuple[str, str] | None:
    """Find what looks like a tool call in text: the name of its form, and the text around; None where nothing does."""
    if (match := _ANY_FORM.search(text)) is None or match.lastindex is None:
        return None
    around = text[max(match.start() - 20, 0) : match.end() + 60]
    return list(_FORMS)[match.lastindex - 1], around


def list_turns_without_calls(episodes: Iterable[Trajectory]) -> list[str]:
    """List the model's turns that have no parsed call."""
    return [m["content"] for t in episodes for m in t.messages if m["role"] == "assistant" and not m.get("tool_calls")]


@dataclass
class ToolUse:
    """Counts over the episodes of an evaluation in which tools were offered."""

    episodes: int = 0
    calls: int = 0
    unread: int = 0  # calls that could not be parsed
    error: str = ""  # of the first of those
    turns: int = 0  # without a call
    forms: Counter[str] = field(default_factory=Counter)  # of the turns without a call that look like one
    example: str = ""
    said: str = ""  # the first turn without a call

    def add(self, episode: Trajectory) -> None:
        """Count an episode; one that ended in a fault tells nothing."""
        if episode.fault is not None:
            return
        unread = [call for call in episode.calls if call.status == "parse"]
        self.episodes += 1
        self.calls += len(episode.calls)
        self.unread += len(unread)
        if unread and not self.error:
            said = [m["content"] for m in episode.messages if m["role"] == "tool" and m.get("is_error")]
            self.error = said[0] if said else ""
        for text in list_turns_without_calls([episode]):
            self.turns += 1
            self.said = self.said or text.strip()
            if (found := find_call_form(text)) is not None:
                self.forms[found[0]] += 1
                self.example = self.example or found[1]

    def explain(self, model: str) -> str | None:
        """Explain that no call was made, or none could be read, and what to do; None where the tools are used.

        Args:
            model: as the command line names it.
        """
        if self.episodes < LEAST or self.calls > self.unread:
            return None
        check = f"agentrl check model {model} shows how its chat template writes calls"
        if self.calls:
            error = f" (the first: {self.error[:120]})" if self.error else ""
            return (
                f"tools are offered, and not one of {self.calls} calls could be read{error}: {check}; what the model "
                "was trained on may be another form, which --call_format or --chat_template names"
            )
        if self.forms.total():
            form, count = self.forms.most_common(1)[0]
            return (
                f"tools are offered, and none was called; but {count} of {self.turns} turns look like calls in the form"
                f" {form}, which is not read here: {self.example!r}. {check}; give the one of that form with "
                "--chat_template, or --call_format"
            )
        shown = self.said if len(self.said) <= _SHOWN else f"{self.said[:_SHOWN]}..."
        return (
            f"tools are offered, and none was called in {self.episodes} episodes (the first turn: {shown!r}): what is "
            f"never tried is never rewarded. {check}; if that is right, ask for a call in the system prompt, or begin "
            "with a model that was taught to call tools"
        )
