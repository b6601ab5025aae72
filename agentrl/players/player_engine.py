"""The engine that a player samples from, as the controller describes it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from agentrl.engines.vllm.turn_servers import TurnServers
from agentrl.errors import UserError
from agentrl.players.connection import FrameStream
from agentrl.players.engine_door import ForwardedEngine
from agentrl.rollout.engine_protocol import Engine
from agentrl.settings.registry import import_object


class PlayerEngine(Engine, AbstractAsyncContextManager[Any], Protocol):
    """An engine that is entered and left."""


def build_engine(described: Mapping[str, Any], connection: FrameStream, ask: Any) -> PlayerEngine:
    """Build the engine that a welcome describes, not yet entered.

    Args:
        ask: sends a question to the controller and returns the frame that answers it.

    Raises:
        UserError: there is no such engine here.
    """
    kind = described["kind"]
    if kind == "forwarded":
        return ForwardedEngine(connection, ask, described)
    if kind == "import":
        engine: PlayerEngine = import_object("engine", described["import"])(**described["arguments"])
        return engine
    if kind == "servers":
        return TurnServers(described)
    raise UserError(f"the run's engine is of the kind {kind!r}, which this player does not know")
