"""The first lines of an agent's process in a sandbox: ``python enter_sandbox.py SOCKET PORT COMMAND ...``

The network in here has nothing but a loopback of its own. A port is opened on it, and handed out through the socket
that was inherited: who is outside answers there. Then the process becomes the command.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys


def hand_out(channel: int, port: int) -> None:
    """Open a port on the loopback, and send it through the channel."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    with socket.socket(fileno=channel) as outside:
        socket.send_fds(outside, [b"port"], [listener.fileno()])
    listener.close()


if __name__ == "__main__":
    hand_out(int(sys.argv[1]), int(sys.argv[2]))
    command = shutil.which(sys.argv[3])
    if command is None:
        sys.exit(f"{sys.argv[3]} is not to be seen in the sandbox: name its folder in agent_readable")
    os.execv(command, sys.argv[3:])
