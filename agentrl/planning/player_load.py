"""The load of players and their controller: cores, by what a turn and a group were measured to take (benchmarks)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from agentrl.planning.workload import Workload

TURN_S, TOKEN_S = 0.35e-3, 9e-9  # of a core: a turn over HTTP, and each token of its context
GROUP_S, GROUP_TOKEN_S = 0.1e-3, 6e-9  # of the controller's core: a group, and each of its tokens
TURNS = 6  # of an episode, where no setting says how many
BUSY = 0.7  # of a core, that a player may be: it is one event loop, and tools want some of it


@dataclass(frozen=True)
class PlayerLoad:
    """The CPU that rollouts take while a batch is sampled.

    Args:
        turns_s: turns a second.
        cores: of the framework's own work in players, all together.
        controller: share of a core.
    """

    turns_s: float
    cores: float
    controller: float

    @property
    def players(self) -> int:
        """Return the fewest players that are not in the engine's way."""
        return max(1, ceil(self.cores / BUSY))


def measure_player_load(work: Workload, group_size: int, turns: int | None, seconds: float) -> PlayerLoad:
    """Return the load of a step's episodes that are sampled within so many seconds."""
    each = turns or TURNS
    count = work.episodes * each
    cores = count * (TURN_S + TOKEN_S * work.context / 2) / seconds
    groups = work.episodes / group_size
    controller = groups * (GROUP_S + GROUP_TOKEN_S * work.context * group_size) / seconds
    return PlayerLoad(count / seconds, cores, controller)


def describe_player_load(load: PlayerLoad, count: int) -> str:
    """Say in a line whether so many players are enough; 0: as many as join."""
    line = (
        f"players: {load.turns_s:,.0f} turns/s take {load.cores:.2f} of a core without their tools, the controller "
        f"{load.controller:.2%} of one"
    )
    if count and count < load.players:
        return f"{line}; {count} would be in the engine's way: --players {load.players}"
    return f"{line}; {load.players} {'is' if load.players == 1 else 'are'} enough"
