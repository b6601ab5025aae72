"""The server that the client starts: it forks the zygote, and becomes the dispatcher.

Its first line in are the settings, its first line out the walls that stand here, or why there are none.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl_tools.sandbox.inside import confinement, descriptors, namespaces
    from agentrl_tools.sandbox.inside import zygote as zygotes
    from agentrl_tools.sandbox.inside.dispatcher import Dispatcher
else:  # by its file: this runs where the package is not
    sys.path.insert(0, str(Path(__file__).parent))
    import confinement
    import descriptors
    import namespaces
    import zygote as zygotes
    from dispatcher import Dispatcher

MEGABYTE = 1 << 20


def start_processes() -> None:
    """Split into dispatcher and zygote; serve until the client ends."""
    settings = json.loads(_line())
    if descriptors.allow_all() <= descriptors.CONTROL + 16:
        _tell({"error": f"{descriptors.allow_all()} open files are too few for a sandbox: raise 'ulimit -Hn'"})
        return
    os.environ.clear()
    os.environ.update(PATH="/usr/bin", LANG="C.UTF-8", OPENBLAS_NUM_THREADS="1")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        _be_the_zygote(settings, theirs)
        os._exit(0)
    theirs.close()
    _confine(settings)
    answer = json.loads(ours.recv(1 << 16) or b'{"error": "the zygote ended"}')
    _tell(answer)
    if "error" not in answer:
        Dispatcher(settings, ours, answer["tmpfs"]).run()


def _be_the_zygote(settings: dict[str, Any], requests: socket.socket) -> None:
    """Import, find the walls that stand here, tell them, and fork sessions until nobody asks for them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # the client hears the dispatcher alone
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", encoding="utf-8", errors="replace", closefd=False) for fd in (1, 2))
    confinement.die_with_parent()
    zygotes.import_packages(settings["preload"])
    proc = namespaces.find_proc()
    if settings["detach_proc"]:
        namespaces.detach("/proc")
    limits = {"FSIZE": 16 * MEGABYTE, "STACK": 16 * MEGABYTE, "CORE": 0, "MEMLOCK": 0, "MSGQUEUE": 0, "SIGPENDING": 64}
    confinement.set_limits(confinement.build_limits(**limits))
    confinement.drop_bounding_set()
    confinement.gain_no_privileges()
    confinement.load_seccomp_filter(base64.b64decode(settings["unknown_bpf"]))
    confinement.load_seccomp_filter(base64.b64decode(settings["zygote_bpf"]))
    walls, trouble = zygotes.build_walls(settings, proc)
    if walls.tmpfs and settings["detach_folders"]:
        namespaces.detach(settings["folders"])  # nobody needs a place that all could write to
    found = {"error": trouble} if trouble else {"tmpfs": walls.tmpfs, "landlock": walls.landlock}
    requests.send(json.dumps(found).encode())
    zygotes.Zygote(requests, walls).run()


def _confine(settings: dict[str, Any]) -> None:
    """Give up what the dispatcher does not need: it stops sessions, and removes folders that are no mounts."""
    if settings["users"]:
        held = confinement.get_capabilities()
        kept = 1 << confinement.CAP_KILL | 1 << confinement.CAP_SYS_NICE | 1 << confinement.CAP_DAC_OVERRIDE
        confinement.drop_bounding_set()
        confinement.keep_capabilities(held & kept)
    else:
        confinement.keep_capabilities(0)
    confinement.gain_no_privileges()
    confinement.load_seccomp_filter(base64.b64decode(settings["dispatcher_bpf"]))


def _tell(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def _line() -> bytes:
    """Read one line unbuffered: the bytes after it are the dispatcher's."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            sys.exit("nobody is there")
        line += byte
    return line


if __name__ == "__main__":
    start_processes()
