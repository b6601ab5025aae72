"""The keys of vLLM servers that `agentrl serve` starts: one a launch, in a file that only its user reads.

A server's URL can be copied from one command to the next, and stands in files and listings of processes; its key does
not. Who is the same user on the same machine finds it by the URL. On another machine ``$VLLM_API_KEY`` has it.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

KEY_ENV = "VLLM_API_KEY"
LOCAL, EVERYWHERE = ("127.0.0.1", "localhost", "::1"), ("0.0.0.0", "::")  # hosts to listen on


def format_url(host: str, port: int) -> str:
    """Format the address by which others call a server; of one that listens everywhere by this machine's name."""
    name = socket.gethostname() if host in EVERYWHERE else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def choose_key(variable: str = KEY_ENV) -> str:
    """Return the key for all servers of a run: that of the environment, or a new one, which outlives each of them."""
    return os.environ.get(variable) or secrets.token_urlsafe(32)


def create_server_key(port: int, variable: str = KEY_ENV) -> str:
    """Return the key for a server on a port of this machine: that of the environment, or a new one in its file.

    Args:
        variable: the environment variable that may have it.
    """
    if key := os.environ.get(variable):
        return key
    key, path = secrets.token_urlsafe(32), find_key_file(port)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of a server that was killed
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    return key


def remove_server_key(port: int, key: str) -> None:
    """Remove the key's file, unless it is another server's by now."""
    path = find_key_file(port)
    if _read(path) == key:
        path.unlink(missing_ok=True)


def find_server_key(url: str, variable: str = KEY_ENV) -> str | None:
    """Return the key of a server on this machine: that of the environment, or of this user's server at that port."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError:  # of no server
        return None
    if host not in LOCAL:
        return None
    return os.environ.get(variable) or _read(find_key_file(port))


def find_key_file(port: int) -> Path:
    """Return the path of a key's file; the name has the machine's, as several may share a home."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) if runtime else Path.home() / ".cache"
    return folder / "agentrl" / "servers" / f"{socket.gethostname()}-{port}.key"


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8") if path.stat().st_uid == os.geteuid() else None
    except OSError:
        return None


REFUSALS = (401, 403)  # of vLLM's own door, and of ours


class ServerAuth(httpx2.Auth):
    """The header that shows a server's key. It is looked up again where it is refused: a new server has another."""

    def __init__(self, url: str) -> None:
        self._url, self._key = url, ""

    def auth_flow(self, request: httpx2.Request):  # type: ignore[no-untyped-def]  # a generator of httpx2's
        known = self._key = self._key or self._find()
        if known:
            request.headers["Authorization"] = f"Bearer {known}"
        response = yield request
        if response.status_code in REFUSALS and (new := self._find()) not in ("", known):
            self._key, request.headers["Authorization"] = new, f"Bearer {new}"
            yield request

    def _find(self) -> str:
        return find_server_key(self._url) or os.environ.get(KEY_ENV, "")
