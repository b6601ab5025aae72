"""A web server on this machine's loopback that leaves signals to the program around it."""

from __future__ import annotations

import socket
from contextlib import nullcontext

import uvicorn


class LoopbackServer(uvicorn.Server):
    """uvicorn's server, which handles no signal."""

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        return nullcontext()


def listen_on_loopback(port: int = 0) -> socket.socket:
    """Open a socket on a port, or any free one. Raises OSError: it is taken."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # spelled out, or asyncio leaves Nagle's 40 ms on
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener
