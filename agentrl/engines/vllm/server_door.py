"""The door of a vLLM server, loaded into its process by ``--middleware``.

vLLM's own ``--api-key`` guards the paths below ``/v1``. Those by which weights come, and a server pauses, are open
without it.
"""

from __future__ import annotations

import os

from agentrl.engines.server_keys import KEY_ENV
from agentrl.runtime.door import App, Door

HINT = f"be the user that started it, on the same machine; else set ${KEY_ENV} to what it was for agentrl serve"


class ServerDoor(Door):
    """A door that wants the server's key on each path but ``/health``, and lets no web page in."""

    def __init__(self, app: App) -> None:
        key = os.environ.get(KEY_ENV)
        if not key:
            raise RuntimeError(f"a server of agentrl's is not started without ${KEY_ENV}")
        super().__init__(app, key, hint=HINT, hosts=(), same_origin=False, free=("/health",))
