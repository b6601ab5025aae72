"""The page's server: static files, and JSON about the runs. It answers this machine alone, and only GET requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.errors import UserError
from agentrl.runs.folder import replace_non_finite
from agentrl.runs.reader import parse_episode_id
from agentrl.runtime.door import Door
from agentrl.view import episode
from agentrl.view.explain import describe_position, explain_advantage, explain_exclusion, explain_token, find_group
from agentrl.view.panels import Panel
from agentrl.view.run_cache import RunCache
from agentrl.view.search import list_episodes, list_groups
from agentrl.view.settings_table import compare_settings
from agentrl.view.store import Store
from agentrl.view.thread_tree import describe_tree

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
HINT = "open the whole URL that agentrl view printed, with ?token=..."
_Answer = Callable[[RunCache, Request], Any]


def build_app(stores: Sequence[Store], panels: Mapping[str, Panel] | None = None, *, token: str = "") -> Starlette:
    """Build the ASGI app, with what plugins add to its page, and read the runs in a thread.

    Args:
        token: answers are for those who show it; for all of this machine without one.
    """
    runs = [RunCache(store, panels) for store in stores]
    threading.Thread(target=_read_all, args=(runs,), daemon=True).start()
    answers: dict[str, _Answer] = {
        "metrics": _metrics,
        "findings": lambda run, _: [finding._asdict() for finding in run.findings()],
        "failures": lambda run, _: run.failures(),
        "heldout": lambda run, _: run.held_out(),
        "panels": lambda run, _: run.panels(),
        "tools": lambda run, _: run.store.tools(),
        "timeline": _timeline,
        "processes": _processes,
        "episodes": _episodes,
        "groups": _groups,
        "episode": _episode,
        "text": _text,
        "tokens": _tokens,
        "explain": _explain,
    }
    routes = [Route(f"/api/{name}", partial(_of_run, runs, answer)) for name, answer in answers.items()]
    return Starlette(
        routes=[
            Route("/", partial(_static, {"": (STATIC / "index.html").read_bytes()})),
            Route("/api/runs", partial(_runs, runs)),
            Route("/api/settings", partial(_settings, runs)),
            *routes,
            Route(
                "/static/{name}", partial(_static, {f.name: f.read_bytes() for f in STATIC.iterdir() if f.is_file()})
            ),
        ],
        middleware=[
            Middleware(_Headers),
            Middleware(Door, token, hint=HINT, cookie=f"agentrl-{blake2b(token.encode(), digest_size=6).hexdigest()}"),
        ],
    )


class _Headers:
    """A middleware that puts the same headers on every answer."""

    def __init__(self, inner: ASGIApp) -> None:
        self.inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(k, v) for k, v in message["headers"] if k.decode().lower() not in HEADERS]
                message["headers"] = [*kept, *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        await self.inner(scope, receive, send_with_headers)


def _read_all(runs: Sequence[RunCache]) -> None:
    for run in runs:
        run.store.refresh()
        run.findings()  # asked for first


async def _static(files: dict[str, bytes], request: Request) -> Response:
    """Answer with a file of the page, from memory: there are two dozen, and the page asks for each."""
    name = request.path_params.get("name", "")
    if name not in files:
        return Response("there is no such file", 404, media_type="text/plain")
    return _tagged(request, files[name], TYPES[name.rpartition(".")[2] or "html"])


async def _runs(runs: Sequence[RunCache], request: Request) -> Response:
    def summarize() -> list[dict[str, Any]]:
        for run in runs:
            run.store.refresh(LOOK_S)
        return [{"run": i, **run.summary()} for i, run in enumerate(runs)]

    return _json(request, await run_in_threadpool(summarize))


async def _settings(runs: Sequence[RunCache], request: Request) -> Response:
    stores = [run.store for run in runs]
    rows = await run_in_threadpool(compare_settings, stores)
    return _json(request, {"runs": [s.name for s in stores], "rows": [row._asdict() for row in rows]})


async def _of_run(runs: Sequence[RunCache], answer: _Answer, request: Request) -> Response:
    def compute() -> Any:
        number = _number(request, "run", 0)
        if number >= len(runs):
            raise UserError(f"there are {len(runs)} runs here, and no run {number}")
        return answer(runs[number], request)

    try:
        return _json(request, await run_in_threadpool(compute))
    except UserError as error:
        return _json(request, {"error": str(error)}, 400)


def _json(request: Request, value: Any, status: int = 200) -> Response:
    """Answer with strict JSON (no NaN), and a tag by which an answer that did not change is not sent again."""
    try:
        text = json.dumps(value, allow_nan=False, default=str)
    except ValueError:  # a number in a damaged file, or of a run that diverged
        text = json.dumps(replace_non_finite(value), allow_nan=False, default=str)
    return _tagged(request, text.encode(), "application/json", status)


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


def _metrics(run: RunCache, request: Request) -> dict[str, Any]:
    """Answer with the metrics from line ``since`` on; with all if lines were taken back."""
    metrics = run.store.metrics
    generation = _number(request, "generation", metrics.generation)
    names = ("since", "lines", "generation", "series")
    return dict(zip(names, metrics.columns(_number(request, "since", 0), generation), strict=True))


def _timeline(run: RunCache, request: Request) -> dict[str, Any]:
    """Answer with the pictures of a step, the last by default, and the steps that have some."""
    run.timelines.refresh()
    steps = run.timelines.steps()
    step = _number(request, "step", steps[-1] if steps else 0)
    return {"step": step, "steps": steps, "pictures": run.timelines.pictures(step)}


def _processes(run: RunCache, request: Request) -> dict[str, Any]:
    step = _number(request, "step", 0) if "step" in request.query_params else None
    return run.processes(step, _number(request, "steps", 10))


def _episodes(run: RunCache, request: Request) -> dict[str, Any]:
    now, rows = run.search.rows(_word(request, "q"), _word(request, "sort"))
    start, limit = _number(request, "offset", 0), min(_number(request, "limit", 100), MOST)
    shown = list_episodes(now.table, rows[start : start + limit])
    return {"version": now.version, "total": now.table.num_rows, "matched": len(rows), "offset": start, "rows": shown}


def _groups(run: RunCache, request: Request) -> dict[str, Any]:
    now, rows = run.search.rows(_word(request, "q"), _word(request, "sort"))
    start, limit = _number(request, "offset", 0), min(_number(request, "limit", 50), MOST)
    matched, shown = list_groups(now.table, rows, start, limit)
    return {"version": now.version, "total": now.table.num_rows, "matched": matched, "offset": start, "rows": shown}


def _episode(run: RunCache, request: Request) -> dict[str, Any]:
    where = parse_episode_id(_word(request, "id"))
    row = run.row(where)
    group = find_group(run.store, where)
    small = (
        "step",
        "split",
        "task",
        "sample",
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
        "place": describe_position(run.store, row),
        **{name: row.get(name) for name in (*small, "fault_message", "step_rewards", "timings")},
        "learned_at": run.store.metrics.version_at(row["step"], row["split"]),
        "not_trained": explain_exclusion(run.store, row, group),
        "advantage_explained": explain_advantage(run.store, row, group),
        "group": group,
        "messages": episode.describe_messages(row, run.texts),
        **episode.describe_info(row),
        "segments": episode.describe_segments(row),
        "threads": describe_tree(row, run.texts),
    }


def _text(run: RunCache, request: Request) -> dict[str, Any]:
    row = run.row(parse_episode_id(_word(request, "id")))
    call = _number(request, "call", 0) if "call" in request.query_params else None
    thread = _number(request, "thread", 0) if "thread" in request.query_params else None
    text = episode.find_text(row, _number(request, "message", 0), call, thread)
    return episode.cut_piece(text, _number(request, "from", 0))


def _tokens(run: RunCache, request: Request) -> dict[str, Any]:
    row = run.row(parse_episode_id(_word(request, "id")))
    return episode.describe_tokens(row, run.texts, _number(request, "from", 0))


def _explain(run: RunCache, request: Request) -> list[str]:
    name = _word(request, "id")
    return explain_token(run.store, run.texts, name, _number(request, "token", 0), run.row(parse_episode_id(name)))
