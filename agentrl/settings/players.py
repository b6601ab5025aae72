"""The settings of players: processes that roll out in the place of this one."""

from __future__ import annotations

import pydantic
from pydantic import Field

from agentrl.settings.section import Section
from agentrl.settings.values import PlayerLauncherName


class PlayersConfig(Section):
    """The players, which roll out groups that they are leased. ``players = 2`` is short for ``players.count = 2``."""

    count: int = Field(
        0, ge=0, description="players that the run starts; 0: rollouts in this process, unless others join"
    )
    launcher: PlayerLauncherName = Field(
        "subprocess",
        description="what starts them: agentrl list player_launchers, or file.py:function",
    )
    host: str | None = Field(
        None, description="address at which players join: agentrl player URL; that of this machine alone by default"
    )
    port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="port at which players join, also without any of the run's own; any by default",
    )
    timeout_s: float = Field(30.0, gt=0, description="silence of a player after which others are leased its groups")

    @pydantic.model_validator(mode="after")
    def _used(self) -> PlayersConfig:
        if not self.are_used and (given := {"launcher", "host", "timeout_s"} & self._list_given()):
            raise ValueError(f"{min(given)} is of players, and there are none: count, or port for those that join")
        if not self.count and self.launcher != "subprocess":
            raise ValueError(f"launcher {self.launcher} starts players, and count 0 wants none")
        return self

    @property
    def are_used(self) -> bool:
        """Return True if groups are rolled out by players."""
        return self.count > 0 or self.port is not None

    def _list_given(self) -> set[str]:
        return {name for name, one in type(self).model_fields.items() if getattr(self, name) != one.default}
