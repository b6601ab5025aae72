"""A door before a server of this machine: who knocks shows a token; web pages of others do not come in.

Other users of a machine reach its loopback address, and so does each web page that its browser opens: by a request from
another origin, or by a host name that was made to point here.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from agentrl.errors import UserError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL = ("127.0.0.1", "localhost", "::1")
TOKEN_ENV = "AGENTRL_TOKEN"
TOKEN_HELP = f"of the URL; ${TOKEN_ENV} or one drawn by chance by default; empty: no token"


def choose_token(given: str | None) -> str:
    """Return the token of a server: what was given, else that of ``$AGENTRL_TOKEN``, else one drawn by chance.

    An empty one leaves the door open.

    Raises:
        UserError: it has characters that a URL would have to escape.
    """
    token = given if given is not None else os.environ.get(TOKEN_ENV) or secrets.token_urlsafe(24)
    if not all(c.isascii() and (c.isalnum() or c in "-_.~") for c in token):
        raise UserError("a token has letters, digits, and - _ . ~ only; leave it out to have one drawn")
    return token


def format_query(token: str) -> str:
    """Return the end of a URL that shows the token."""
    return f"?token={token}" if token else ""


class Door:
    """An ASGI middleware that lets in who shows the token: as ``Authorization: Bearer``, in the URL, or in a cookie.

    Args:
        token: empty: everybody of this machine has it.
        hint: the end of the sentence that a request without the token is answered by.
        cookie: a page that is opened with the token in its URL gets a cookie of this name, which its own requests show.
        hosts: the names by which the server may be called; all if there are none.
        same_origin: the server's own pages may send an ``Origin``; else nothing that has one comes in.
        free: paths that need no token.
    """

    def __init__(
        self,
        inner: App,
        token: str,
        *,
        hint: str,
        cookie: str = "",
        hosts: Sequence[str] = LOCAL,
        same_origin: bool = True,
        free: Sequence[str] = (),
    ) -> None:
        self.inner, self._token, self._hint, self._cookie = inner, token.encode(), hint, cookie
        self._hosts, self._same_origin, self._free = tuple(hosts), same_origin, tuple(free)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.inner(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0].encode()
        if (problem := self._find_problem(scope, headers, asked)) is not None:
            await _refuse(scope, send, *problem)
        elif self._cookie and self._token and secrets.compare_digest(asked, self._token):
            await self.inner(scope, receive, self._with_cookie(send))
        else:
            await self.inner(scope, receive, send)

    def _find_problem(self, scope: Scope, headers: dict[bytes, bytes], asked: bytes) -> tuple[int, str] | None:
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin", b"").decode("latin-1")
        if self._hosts and _split(f"//{host}")[0] not in self._hosts:
            return 400, f"this server answers by the names {', '.join(self._hosts)} only"
        if origin and not (self._same_origin and _split(origin)[1] == host.lower()):
            return 403, "this server answers no web page of another origin"
        if not self._token or scope["path"] in self._free:
            return None
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        shown = (asked, bearer.strip() if kind.lower() == b"bearer" else b"", self._read_cookie(headers))
        if any(secrets.compare_digest(one, self._token) for one in shown):
            return None
        return 403, f"this server wants a token: {self._hint}"

    def _read_cookie(self, headers: dict[bytes, bytes]) -> bytes:
        try:
            cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return b""
        return cookies[self._cookie].value.encode() if self._cookie and self._cookie in cookies else b""

    def _with_cookie(self, send: Send) -> Send:
        value = f"{self._cookie}={self._token.decode()}; Path=/; HttpOnly; SameSite=Strict"

        async def send_with_cookie(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"set-cookie", value.encode())]
            await send(message)

        return send_with_cookie


def _split(address: str) -> tuple[str | None, str]:
    """Return an address's host name, and the name with the port."""
    try:
        parts = urlsplit(address)
        return parts.hostname, parts.netloc.lower()
    except ValueError:
        return None, ""


async def _refuse(scope: Scope, send: Send, status: int, sentence: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    kind = [(b"content-type", b"text/plain; charset=utf-8"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": kind})
    await send({"type": "http.response.body", "body": f"agentrl: {sentence}\n".encode()})
