"""Turns asked of a vLLM server behind its key. A server that was started anew has another one, which is looked up."""

from __future__ import annotations

import os

from agentrl.engines.server_keys import KEY_ENV, REFUSALS, find_server_key
from agentrl.engines.vllm.lean_http import LeanHttp
from agentrl.settings.secret import Secret

GENERATE = "/inference/v1/generate"


class KeyedHttp:
    """A server's address for one request, with its key.

    Args:
        key: by default it is looked up, and so it is where a key is refused.
    """

    def __init__(self, url: str, path: str, key: str = "") -> None:
        self._url, self._key = url, key
        self._http = LeanHttp(Secret(url).reveal(), path)

    async def post(self, body: bytes) -> tuple[int, bytes]:
        """Send a body of JSON; return the status and the body of the answer. Raises HttpLost: the server is gone."""
        known = self._key = self._key or find_key(self._url)
        status, answer = await self._http.post(body, known)
        if status in REFUSALS and (new := find_key(self._url)) not in ("", known):
            self._key = new
            status, answer = await self._http.post(body, new)
        return status, answer

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


def find_key(url: str) -> str:
    """Return the key of a server: that of this user's server there, or that of the environment; empty for none."""
    return find_server_key(url) or os.environ.get(KEY_ENV, "")
