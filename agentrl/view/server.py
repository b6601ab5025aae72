"""The page's server: static files, and JSON about the runs. Answers this machine alone, and only to GET."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.errors import UserError
from agentrl.stored import place
from agentrl.view import episode
from agentrl.view.explain import group_of, token_told, where_from, why_not_trained
from agentrl.view.look import Look
from agentrl.view.search import groups, page
from agentrl.view.settings_table import compare_settings
from agentrl.view.store import Store

STATIC = Path(__file__).parent / "static"
LOOK_S = 1.0  # a run is looked at again at most so often
MOST = 500  # rows of a page
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
HEADERS = {
    # data: is for nothing but the page's own mark
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
Answer = Callable[["Look", Request], Any]


def app(stores: Sequence[Store]) -> Starlette:
    """The whole of it. The runs are read in a thread meanwhile."""
    looks = [Look(store) for store in stores]
    threading.Thread(target=_read_all, args=(looks,), daemon=True).start()
    answers: dict[str, Answer] = {
        "metrics": _metrics,
        "findings": lambda look, _: look.findings(),
        "trouble": lambda look, _: look.trouble(),
        "heldout": lambda look, _: look.held_out(),
        "tools": lambda look, _: look.store.tools(),
        "timeline": _timeline,
        "episodes": _episodes,
        "groups": _groups,
        "episode": _episode,
        "text": _text,
        "tokens": _tokens,
        "explain": _explain,
    }
    routes = [Route(f"/api/{name}", partial(_of_run, looks, answer)) for name, answer in answers.items()]
    return Starlette(
        routes=[
            Route("/", partial(_static, {"": (STATIC / "index.html").read_bytes()})),
            Route("/api/runs", partial(_runs, looks)),
            Route("/api/settings", partial(_settings, looks)),
            *routes,
            Route(
                "/static/{name}", partial(_static, {f.name: f.read_bytes() for f in STATIC.iterdir() if f.is_file()})
            ),
        ],
        middleware=[
            Middleware(_Headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"], www_redirect=False),
        ],
    )


class _Headers:
    """The same headers on every answer."""

    def __init__(self, inner: ASGIApp) -> None:
        self.inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(k, v) for k, v in message["headers"] if k.decode().lower() not in HEADERS]
                message["headers"] = [*kept, *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        await self.inner(scope, receive, told)


def _read_all(looks: Sequence[Look]) -> None:
    for look in looks:
        look.store.refresh()
        look.findings()  # asked for first


async def _static(files: dict[str, bytes], request: Request) -> Response:
    """The page's files, from memory: there are a dozen, and each is asked for at the first view."""
    name = request.path_params.get("name", "")
    if name not in files:
        return Response("there is no such file", 404, media_type="text/plain")
    return _tagged(request, files[name], TYPES[name.rpartition(".")[2] or "html"])


async def _runs(looks: Sequence[Look], request: Request) -> Response:
    def told() -> list[dict[str, Any]]:
        for look in looks:
            look.store.refresh(LOOK_S)
        return [{"run": i, **look.summary()} for i, look in enumerate(looks)]

    return _json(request, await run_in_threadpool(told))


async def _settings(looks: Sequence[Look], request: Request) -> Response:
    stores = [look.store for look in looks]
    rows = await run_in_threadpool(compare_settings, stores)
    return _json(request, {"runs": [s.name for s in stores], "rows": [row._asdict() for row in rows]})


async def _of_run(looks: Sequence[Look], answer: Answer, request: Request) -> Response:
    def told() -> Any:
        number = _number(request, "run", 0)
        if number >= len(looks):
            raise UserError(f"there are {len(looks)} runs here, and no run {number}")
        return answer(looks[number], request)

    try:
        return _json(request, await run_in_threadpool(told))
    except UserError as error:
        return _json(request, {"error": str(error)}, 400)


def _json(request: Request, value: Any, status: int = 200) -> Response:
    """JSON that any reader takes (no NaN), with a tag by which an answer that did not change is not sent again."""
    return _tagged(request, json.dumps(value, allow_nan=False, default=str).encode(), "application/json", status)


def _tagged(request: Request, body: bytes, media_type: str, status: int = 200) -> Response:
    tag = f'"{blake2b(body, digest_size=12).hexdigest()}"'
    if status == 200 and request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(body, status, {"etag": tag}, media_type=media_type)


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise UserError(f"{name} is a whole number from 0 on, not {text!r}")
    return int(text)


def _word(request: Request, name: str) -> str:
    return request.query_params.get(name, "")


def _metrics(look: Look, request: Request) -> dict[str, Any]:
    """What came since line ``since``; everything where lines were taken back."""
    curves = look.store.curves
    generation = _number(request, "generation", curves.generation)
    names = ("since", "lines", "generation", "series")
    return dict(zip(names, curves.columns(_number(request, "since", 0), generation), strict=True))


def _timeline(look: Look, request: Request) -> dict[str, Any]:
    """Answer with the pictures of a step, the last by default, and the steps that have some."""
    look.timelines.refresh()
    steps = look.timelines.steps()
    step = _number(request, "step", steps[-1] if steps else 0)
    return {"step": step, "steps": steps, "pictures": look.timelines.pictures(step)}


def _episodes(look: Look, request: Request) -> dict[str, Any]:
    now, rows = look.search.rows(_word(request, "q"), _word(request, "sort"))
    start, limit = _number(request, "offset", 0), min(_number(request, "limit", 100), MOST)
    shown = page(now.table, rows[start : start + limit])
    return {"version": now.version, "total": now.table.num_rows, "matched": len(rows), "offset": start, "rows": shown}


def _groups(look: Look, request: Request) -> dict[str, Any]:
    now, rows = look.search.rows(_word(request, "q"), _word(request, "sort"))
    start, limit = _number(request, "offset", 0), min(_number(request, "limit", 50), MOST)
    matched, shown = groups(now.table, rows, start, limit)
    return {"version": now.version, "total": now.table.num_rows, "matched": matched, "offset": start, "rows": shown}


def _episode(look: Look, request: Request) -> dict[str, Any]:
    where = place(_word(request, "id"))
    row = look.row(where)
    group = group_of(look.store, where)
    small = (
        "step",
        "split",
        "task",
        "member",
        "reward",
        "rewards",
        "weights",
        "advantage",
        "advantages",
        "credit",
        "weight",
        "stop",
        "fault",
    )
    return {
        "id": str(where),
        **{name: row.get(name) for name in (*small, "fault_message", "step_rewards", "timings")},
        "learned_at": look.store.curves.version_at(row["step"], row["split"]),
        "not_trained": why_not_trained(look.store, row, group),
        "advantage_told": where_from(look.store, row, group),
        "group": group,
        "messages": episode.told(row, look.texts),
        **episode.known(row),
        "segments": episode.segments(row),
    }


def _text(look: Look, request: Request) -> dict[str, Any]:
    row = look.row(place(_word(request, "id")))
    call = _number(request, "call", 0) if "call" in request.query_params else None
    return episode.piece(episode.full_text(row, _number(request, "message", 0), call), _number(request, "from", 0))


def _tokens(look: Look, request: Request) -> dict[str, Any]:
    row = look.row(place(_word(request, "id")))
    return episode.tokens(row, look.texts, _number(request, "from", 0))


def _explain(look: Look, request: Request) -> list[str]:
    where = place(_word(request, "id"))
    return token_told(
        look.store, look.texts, look.row(where), group_of(look.store, where), _number(request, "token", 0)
    )
