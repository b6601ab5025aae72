"""The tools that the episodes of a run were offered, as a run folder keeps them: each list of schemas once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.types import JsonSchema, to_utf8_json

MOST = 8  # lists of a run; an environment that offers others to each episode shows the first ones
LONGEST = 64_000  # characters of a list as JSON


@dataclass
class OfferedTools:
    """Lists of tools' schemas, in the order in which they were first offered."""

    lists: list[list[JsonSchema]] = field(default_factory=list)
    changed: bool = False  # since they were last written

    def add(self, tools: Sequence[JsonSchema]) -> None:
        """Take a list in, unless it is known or there are too many."""
        if len(self.lists) < MOST and list(tools) not in reversed(self.lists):
            self.lists.append(list(tools))
            self.changed = True

    def dump(self) -> str:
        """Return JSON: a list of lists of schemas; of a long one the last tools are left out."""
        return json.dumps([_bounded(tools) for tools in self.lists], ensure_ascii=False, default=str)


def _bounded(tools: Sequence[JsonSchema]) -> list[Any]:
    kept: list[Any] = []
    left = LONGEST
    for tool in tools:
        left -= len(json.dumps(tool, ensure_ascii=False, default=str))
        if left < 0:
            break
        kept.append(to_utf8_json(tool))
    return kept
