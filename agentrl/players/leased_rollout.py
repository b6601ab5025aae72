"""A rollout whose groups are rolled out by players: a sibling of `Rollout` that leases what that one plays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.players.arrived import take_group
from agentrl.players.controller import Controller
from agentrl.players.terms import describe_terms, pack_plain
from agentrl.players.told_lanes import include_stretch
from agentrl.rollout.rollout import EpisodeCallback, Rollout
from agentrl.runtime.stalls import Wait
from agentrl.types import Group


@dataclass
class LeasedRollout(Rollout):
    """Rolls out groups by players; tasks, seeds and what is counted are those of a rollout in this process.

    Args:
        context: the name of what folds contexts.
    """

    controller: Controller | None = None
    context: str = "whole"
    _number: int | None = None  # of its terms
    _numbers: set[int] = field(default_factory=set)  # of its terms and those of its copies
    _made_of: tuple[object, ...] = ()  # the parts that the terms of that number describe

    async def group(
        self,
        task: int,
        size: int,
        *,
        seed: int = 0,
        first: int = 0,
        options: Mapping[str, Any] | None = None,
        on_episode: EpisodeCallback | None = None,
    ) -> Group:
        """Lease a group to a player, and return it; `on_episode` hears of its episodes as it arrives."""
        assert self.controller is not None
        fields = {"task": task, "size": size, "seed": seed, "first": first}
        if options:
            fields["options"] = pack_plain(options, "the options of a reset")  # type: ignore[assignment]
        header, body = await self.controller.roll_out(self._find_terms(), size + self.oversample, fields)
        group = take_group(header, body)
        if on_episode is not None:
            for trajectory in group:
                on_episode(trajectory)
        return group

    def _find_terms(self) -> int:
        """Return the number of these terms: a rollout that was copied and changed has others."""
        assert self.controller is not None
        parts = (self.spec, self.sampling, self.limits, self.split, self.options, self.oversample, self.branching)
        if self._number is None or parts != self._made_of:
            self._number = self.controller.add_terms(describe_terms(self, self.context), self)
            self._numbers.add(self._number)
            self._made_of = parts
        return self._number

    def hear(self, fields: Mapping[str, Any]) -> None:
        """Count what a player tells of these episodes."""
        self.turns += fields.get("turns", 0)
        self.tokens += fields.get("tokens", 0)
        self.cancelled += fields.get("cancelled", 0)
        include_stretch(fields, self.lanes)
        for tools in fields.get("offered", ()):
            self.offered_tools.add(tools)
        self.renderer.injection_attempts.update(fields.get("attempts", {}))

    def waits(self) -> list[Wait]:
        """List what its episodes and those of its copies wait for, and at which player."""
        controller = self.controller
        return (
            [] if controller is None else [w for number in sorted(self._numbers) for w in controller.list_waits(number)]
        )
