"""The gateway: a server on this machine's loopback that is the policy, for agents. An API key is an episode."""

from __future__ import annotations

import asyncio
import secrets
import warnings
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio

from agentrl.agents.agent import Agent, AgentEnding
from agentrl.errors import UserError
from agentrl.gateway.agent_episode import AgentEpisode
from agentrl.gateway.dialects import DIALECTS
from agentrl.gateway.dialects.dialect import Dialect
from agentrl.gateway.http_requests import (
    STATUS,
    SampledAnswer,
    answer_json,
    answer_request,
    gather_turns,
    list_model,
    read_body,
    read_key,
    read_request,
    unless_gone,
)
from agentrl.gateway.mcp_tools import PATH, build_mcp, serve_mcp
from agentrl.rollout.episode import EpisodeContext
from agentrl.rollout.threads.forest import TurnRefused
from agentrl.runtime.threads import open_task_group

if TYPE_CHECKING:
    import socket

    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from agentrl.runtime.loopback_server import LoopbackServer

FEWEST = 8  # episodes that end by the same error before a run does


@dataclass
class Gateway:
    """Serves the episodes of agents.

    Args:
        agent: that plays them; None where the environment brings its own.
        episodes: of a step: where the same error ends half of so many, and at least 8, the run ends with it.
        say: is told what is worth a line, once.
    """

    agent: Agent | None
    episodes: int = 128
    say: Callable[[str], None] = warnings.warn
    model: str = "policy"  # as answers name it
    base_url: str = ""
    mcp_url: str = ""  # of the environments' tools, before a key; empty: the package mcp is not installed
    _playing: dict[str, AgentEpisode] = field(default_factory=dict)
    _endings: deque[str] = field(default_factory=deque)
    _told: set[str] = field(default_factory=set)
    _numbers: count[int] = field(default_factory=count)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Gateway]:
        """Serve, and start the agent, until the block ends.

        Raises:
            UserError: a package is missing, or the agent cannot be started.
        """
        try:
            import uvicorn

            from agentrl.runtime.loopback_server import LoopbackServer, listen_on_loopback
        except ImportError as error:
            raise UserError(f"an agent needs the extra gateway: pip install 'agentrl-gym[gateway]' ({error})") from None
        listener, mcp = listen_on_loopback(), build_mcp(self._playing.get)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.base_url, self.mcp_url = f"{address}/v1", f"{address}{PATH}" if mcp is not None else ""
        config = uvicorn.Config(
            self.build_app(mcp), log_level="error", lifespan="off", timeout_keep_alive=600, timeout_graceful_shutdown=1
        )
        web, closed = LoopbackServer(config), anyio.Event()
        async with open_task_group() as tasks, mcp.run() if mcp is not None else nullcontext():
            tasks.start_soon(_serve, web, listener, closed)
            try:
                async with self.agent.open() if self.agent is not None else nullcontext():
                    yield self
            finally:
                web.should_exit = True
                with anyio.move_on_after(3, shield=True):
                    await closed.wait()
                tasks.cancel_scope.cancel()
                listener.close()

    def begin(
        self, context: EpisodeContext, task: int, seed: int, options: Mapping[str, Any] | None = None
    ) -> AgentEpisode:
        """Begin an episode, with a key of its own."""
        key = f"sk-agentrl-{secrets.token_urlsafe(24)}"
        episode = self._playing[key] = AgentEpisode(context, task, seed, options, gateway=self, key=key)
        return episode

    def forget(self, key: str) -> None:
        """Answer a key no more."""
        self._playing.pop(key, None)

    def record_ending(self, ending: AgentEnding) -> None:
        """Count how an agent ended.

        Raises:
            UserError: half of a step's episodes ended by the same error, which it tells.
        """
        self._endings.append(ending.error if ending.counted else "")
        while len(self._endings) > max(FEWEST, self.episodes):  # with fewer they could never be enough
            self._endings.popleft()
        most = max(FEWEST, self.episodes // 2)
        if ending.error and ending.counted and Counter(self._endings)[ending.error] >= most:
            raise UserError(
                f"the agent ends by the same error in {most} of the last {len(self._endings)} episodes: {ending.error}"
                f"\n{ending.trace}".rstrip()
            )

    # -- the server ----------------------------------------------------------------------------------------------------

    def build_app(self, mcp: StreamableHTTPSessionManager | None = None) -> Starlette:
        """Build the ASGI app; ``mcp`` serves the tools, where that is installed."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        doors = [Route(path, partial(self._answer, dialect), methods=["POST"]) for path, dialect in DIALECTS.items()]
        return Starlette(
            routes=[
                *doors,
                *([Route(f"{PATH}/{{key}}", serve_mcp(mcp))] if mcp is not None else []),
                Route("/v1/agentrl/call", self._call, methods=["POST"]),
                Route("/v1/models", self._list_models),
            ]
        )

    async def _answer(self, dialect: type[Dialect], request: Request) -> Response:
        """Answer a request in a dialect: its episode samples a turn."""
        return await answer_request(request, dialect, partial(self._sample, dialect))

    async def _sample(self, dialect: type[Dialect], request: Request) -> SampledAnswer:
        episode, body = self._find(request), await read_body(request)
        asked = read_request(dialect, body, episode.forest.past)
        wanted = asked.count
        self._tell_overridden(asked.overridden)
        episode.requests[asked.name + ", streaming" * asked.streams] += 1
        sent = request.headers.get("x-stainless-retry-count", "")
        is_retry = (sent != "0" if sent else None) if wanted == 1 else False
        sampled = (episode.complete(asked.messages, asked.tools, is_retry=is_retry) for _ in range(wanted))
        turns = await unless_gone(request, asyncio.ensure_future(gather_turns(sampled)))
        model = str(body.get("model") or self.model)
        return SampledAnswer(asked, next(self._numbers), model, turns, episode.renderer.decode)

    def _find(self, request: Request) -> AgentEpisode:
        """Find the episode of a request's key. Raises TurnRefused: there is none."""
        episode = self._playing.get(read_key(request))
        if episode is None:
            sentence = "this key is of no episode that runs: use the task's api_key"
            raise TurnRefused("invalid_api_key", sentence)
        return episode

    async def _list_models(self, request: Request) -> Response:
        return list_model(self.model)

    async def _call(self, request: Request) -> Response:
        """Run a tool of the environment, for `agentrl.agents.task`."""
        try:
            episode, body = self._find(request), await read_body(request)
            name, arguments = body.get("name"), body.get("arguments")
            if not isinstance(name, str) or not isinstance(arguments, str | dict):
                raise TurnRefused("invalid_request", "a call has a name, and arguments: an object, or its text")
            call = asyncio.ensure_future(episode.call_tool(name, arguments))
            return answer_json({"content": await unless_gone(request, call)})
        except TurnRefused as refusal:
            return answer_json(Dialect.format_error(refusal.code, str(refusal)), STATUS[refusal.code])
        except Exception as error:
            sentence = f"the episode ended by {type(error).__name__}"
            return answer_json(Dialect.format_error("episode_over", sentence), STATUS["episode_over"])

    def _tell_overridden(self, names: list[str]) -> None:
        if new := [n for n in names if n not in self._told]:
            self._told.update(new)
            self.say(f"the agent asks for {', '.join(new)}: the run's own sampling stands (rollout)")


async def _serve(web: LoopbackServer, listener: socket.socket, closed: anyio.Event) -> None:
    await web.serve([listener])
    closed.set()
