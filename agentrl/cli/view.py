"""``agentrl view``."""

from __future__ import annotations

import socket
import webbrowser
from collections.abc import Sequence
from contextlib import suppress

from pydantic import Field

from agentrl.cli.words import flags_told, split
from agentrl.config import Section
from agentrl.errors import UserError

HELP = """usage: agentrl view RUN... [--port N] [--open true]

  agentrl view runs/last
  agentrl view runs/a runs/b          # their curves over each other
  agentrl view runs                   # every run in the folder

A web page about runs, also while they go on: curves, groups, conversations token by token, faults, and what stands out.
It answers this machine alone. Ctrl-C ends it.
"""
PORT = 8765


class Settings(Section):
    port: int | None = Field(None, ge=1, le=65535, description=f"where it listens; {PORT} or the next that is free")
    open: bool = Field(False, description="whether a browser is opened")


def main(words: Sequence[str]) -> int:
    if not words or {"-h", "--help"} & set(words):
        print(HELP + "\n" + flags_told(Settings))
        return 0
    names, settings = split(words, Settings, "RUN... [--port N] [--open true]")
    from agentrl.view.store import open_runs

    stores = open_runs(names)
    try:
        import uvicorn

        from agentrl.view.server import app
    except ModuleNotFoundError as error:
        raise UserError(f"agentrl view needs the package {error.name}: pip install 'agentrl-gym[view]'") from None
    listening = listen(settings.port)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    print(
        f"{', '.join(s.name for s in stores[:4])}{' ...' if len(stores) > 4 else ''}: {url}  (Ctrl-C ends it)",
        flush=True,
    )
    if settings.open:
        webbrowser.open(url)
    config = uvicorn.Config(app(stores), log_level="warning", server_header=False, timeout_graceful_shutdown=1)
    with suppress(KeyboardInterrupt):  # which is how it ends
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def listen(port: int | None) -> socket.socket:
    """A socket of this machine alone; without a port the usual one, or the next that is free.

    Raises:
        UserError: the port that was asked for is taken.
    """
    tried = [port] if port else [*range(PORT, PORT + 50), 0]
    for number in tried:
        found = socket.socket()
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(("127.0.0.1", number))
            found.listen()
        except OSError:
            found.close()
            continue
        return found
    raise UserError(f"port {port} is taken or not allowed; give another --port, or none")
