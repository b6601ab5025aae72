"""OpenEnv's wire protocol: JSON over a WebSocket, a question and an answer at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

import pydantic
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from agentrl import ContractError, InfraError, ToolError

_MODELS_MISTAKES = ("VALIDATION_ERROR", "INVALID_JSON")
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_CLOSE_S, _LARGEST = 1.0, 1 << 24  # seconds, bytes


class _Answer(pydantic.BaseModel):
    type: str
    data: dict[str, Any]


class OpenEnvSession:
    """One socket, which is one session of the server."""

    def __init__(self, url: str, socket: ClientConnection) -> None:
        self.url, self.socket = url, socket

    @classmethod
    async def connect(cls, url: str) -> Self:
        """Connect to a server. Raises InfraError if there is none."""
        try:
            return cls(url, await connect(url, close_timeout=_CLOSE_S, max_size=_LARGEST))
        except (OSError, TimeoutError, InvalidHandshake) as error:
            raise InfraError("openenv_gone", f"no OpenEnv server at {url}: {error}") from error

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send ``reset`` or ``step``; return the answer's ``observation``, ``reward`` and ``done``.

        Raises:
            ToolError: the server does not take such an action.
            InfraError: it is gone, failed, or answers what is no answer.
        """
        try:
            await self.socket.send(json.dumps({"type": kind, "data": data}))
            text = await self.socket.recv()
        except ConnectionClosed as error:
            raise InfraError("openenv_gone", f"{self.url} closed the connection at {kind}: {error}") from error
        try:
            answer = _Answer.model_validate_json(text)
        except pydantic.ValidationError:
            raise InfraError("openenv_garbage", f"{self.url} answered {kind} with {text!r:.120}") from None
        if answer.type == "error":
            self._refuse(kind, answer.data)
        reward = answer.data.get("reward") or 0.0
        if "observation" not in answer.data or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise InfraError("openenv_garbage", f"{self.url} answered {kind} with {text!r:.120}")
        return answer.data

    def _refuse(self, kind: str, error: Mapping[str, Any]) -> None:
        if kind == "step" and error.get("code") in _MODELS_MISTAKES:
            raise ToolError(json.dumps(error.get("errors") or error.get("message"), default=str))
        raise InfraError("openenv_error", f"{self.url} at {kind}: {error.get('message', error)}")

    async def close(self) -> None:
        await self.socket.close()


def socket_url(url: str) -> str:
    """Convert ``http://host:8000`` to ``ws://host:8000/ws``. Raises ContractError for anything else."""
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES or not parts.netloc:
        raise ContractError(f"env 'openenv' needs an address such as http://127.0.0.1:8000, not {url!r}")
    path = parts.path if parts.path.strip("/") else "/ws"
    return urlunsplit((_SCHEMES[parts.scheme], parts.netloc, path, parts.query, ""))
