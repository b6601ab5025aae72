"""``agentrl view``."""

from __future__ import annotations

import socket
import webbrowser
from contextlib import suppress

from pydantic import Field

from agentrl.cli.arguments import Arguments, Command
from agentrl.errors import UserError
from agentrl.runtime.door import TOKEN_HELP, choose_token, format_query
from agentrl.settings.section import Section
from agentrl.settings.values import CommaSeparated

TEXT = """\
  agentrl view runs/last
  agentrl view runs/a runs/b          # their curves over each other
  agentrl view runs                   # every run in the folder

A web page about runs, finished or running: curves, groups, conversations token by token, faults, what stands out.
It answers this machine alone, and those who have the token in the URL. Ctrl-C ends it.
"""
PORT = 8765


class _ViewOptions(Section):
    port: int | None = Field(None, ge=1, le=65535, description=f"the port it listens on; {PORT} or the next free one")
    panels: CommaSeparated = Field((), description="plugins' panels beside the registered ones: file.py:function")
    token: str | None = Field(None, description=TOKEN_HELP)
    open: bool = Field(False, description="open a browser")


def _run(arguments: Arguments[_ViewOptions]) -> int:
    from agentrl.view.panels import load_panels
    from agentrl.view.store import open_runs

    token = choose_token(arguments.options.token)
    panels = load_panels(arguments.options.panels)
    stores = open_runs(arguments.names)
    try:
        import uvicorn

        from agentrl.view.server import build_app
    except ModuleNotFoundError as error:
        raise UserError(f"agentrl view needs the package {error.name}: pip install 'agentrl-gym[view]'") from None
    listening = listen(arguments.options.port)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/{format_query(token)}"
    print(
        f"{', '.join(s.name for s in stores[:4])}{' ...' if len(stores) > 4 else ''}: {url}  (Ctrl-C ends it)",
        flush=True,
    )
    if arguments.options.open:
        webbrowser.open(url)
    config = uvicorn.Config(
        build_app(stores, panels, token=token), log_level="warning", server_header=False, timeout_graceful_shutdown=1
    )
    with suppress(KeyboardInterrupt):  # which is how it ends
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def listen(port: int | None) -> socket.socket:
    """Open a socket that only this machine reaches; without a port on the usual one, or the next free one.

    Raises:
        UserError: the port is taken.
    """
    tried = [port] if port else [*range(PORT, PORT + 50), 0]
    for number in tried:
        server = socket.socket()
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", number))
            server.listen()
        except OSError:
            server.close()
            continue
        return server
    raise UserError(f"port {port} is taken or not allowed; give another --port, or none")


COMMAND = Command(
    "view", "RUN... [--port N] [--open] [--panels NAME,NAME] [--token T]", TEXT, _run, _ViewOptions, names=(1, None)
)
