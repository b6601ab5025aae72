"""A policy that is served to people's clients: every conversation with it is recorded, token by token.

A request goes on with the conversation that its history ends with, in the very tokens that were sampled; any other
begins one. Requests that a client gives one name, behind a dot in the API key or as ``X-Session-ID``, are one episode,
whose conversations are its threads.
"""

from __future__ import annotations

import asyncio
import secrets
import warnings
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio

from agentrl.errors import UserError
from agentrl.gateway.client_sampling import read_sampling
from agentrl.gateway.dialects import DIALECTS
from agentrl.gateway.dialects.dialect import Dialect
from agentrl.gateway.http_requests import (
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
from agentrl.gateway.served_conversation import ServedConversation
from agentrl.rollout.episode import EpisodeContext
from agentrl.rollout.seeds import mix_seeds
from agentrl.rollout.threads.conversation import Digest, TurnTree, extend_digest
from agentrl.rollout.threads.forest import SampledTurn, ThreadForest, TurnRefused
from agentrl.types import SamplingParams, Trajectory

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MOST_PAST = 4096  # answers that ``previous_response_id`` may name
FILE = 16  # conversations that are recorded together
HINT = "send the token that agentrl serve-policy printed as the API key"

Record = Callable[[Sequence[Trajectory]], Awaitable[None]]


@dataclass(eq=False)
class PolicyServer:
    """Answers the clients of a policy.

    Args:
        context: of the engine, the renderer and the run's own sampling.
        record: awaited with conversations that have ended.
        token: the API key; empty: everybody who reaches the server has it.
        idle_s: seconds after which a conversation that nobody goes on with has ended.
        say: is told what is worth a line, once.
    """

    context: EpisodeContext
    record: Record
    token: str = ""
    model: str = "policy"  # as answers name it
    idle_s: float = 600.0
    say: Callable[[str], None] = warnings.warn
    answered: int = 0  # requests
    recorded: int = 0  # conversations
    _open: dict[int, ServedConversation] = field(default_factory=dict)
    _named: dict[str, ServedConversation] = field(default_factory=dict)
    _ends: dict[Digest, ServedConversation] = field(default_factory=dict)  # by what may be gone on from
    _ended: list[Trajectory] = field(default_factory=list)  # that are not recorded yet
    _past: OrderedDict[str, list[dict[str, Any]]] = field(default_factory=OrderedDict)
    _digests: TurnTree = field(default_factory=TurnTree)
    _working: set[asyncio.Future[list[SampledTurn]]] = field(default_factory=set)
    _stopped: bool = False
    _cannot_record: bool = False  # and it was said
    _told: set[str] = field(default_factory=set)
    _answers: count[int] = field(default_factory=count)
    _draws: count[int] = field(default_factory=count)
    _numbers: count[int] = field(default_factory=count)

    def build_app(self) -> Starlette:
        """Build the ASGI app."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        doors = [Route(path, partial(self._answer, dialect), methods=["POST"]) for path, dialect in DIALECTS.items()]
        return Starlette(routes=[*doors, Route("/v1/models", self._list_models)])

    async def watch(self) -> None:
        """End conversations that nobody goes on with, and record what has ended, until it is cancelled."""
        while True:
            await anyio.sleep(min(self.idle_s, 5.0))
            await self.end_idle()

    async def end_idle(self, idle_s: float | None = None) -> None:
        """End the conversations that were idle for so long, by default ``idle_s``, and record all that ended.

        What cannot be written is kept, and is tried again with what ends next.
        """
        limit = self.idle_s if idle_s is None else idle_s
        now = self.context.lanes.clock()
        for served in list(self._open.values()):
            if not served.answering and now - served.since >= limit:
                self._end(served)
        try:
            await self._record_ended()
        except UserError as error:
            if not self._cannot_record:
                self.say(f"{error}\n{len(self._ended)} conversations are kept in memory until they can be written")
            self._cannot_record = True

    async def end_all(self) -> None:
        """End what is being answered, and every conversation, and record them.

        Raises:
            UserError: they cannot be written.
        """
        self.stop()
        if self._working:
            await asyncio.wait(self._working)
        for served in list(self._open.values()):
            self._end(served)
        try:
            await self._record_ended()
        except UserError as error:
            raise UserError(f"{error}\n{len(self._ended)} conversations are lost") from None

    def stop(self) -> None:
        """Answer what is being answered by an error."""
        self._stopped = True
        for work in self._working:
            work.cancel()

    async def _record_ended(self) -> None:
        while ended := self._ended[:FILE]:
            with anyio.CancelScope(shield=True):  # written in half it would be written again
                await self.record(ended)
            del self._ended[: len(ended)]
            self.recorded += len(ended)
            self._cannot_record = False

    def _end(self, served: ServedConversation) -> None:
        del self._open[served.number]
        self._named.pop(served.name, None)
        for end in served.ends:
            if self._ends.get(end) is served:
                del self._ends[end]
        for branch in {thread.branch for thread in served.forest.threads}:
            self.context.engine.end_session(served.forest.name_session(branch))
        if served.forest.turns:
            self._ended.append(served.build_trajectory())

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _answer(self, dialect: type[Dialect], request: Request) -> Response:
        return await answer_request(request, dialect, partial(self._sample, dialect))

    async def _list_models(self, request: Request) -> Response:
        try:
            self._read_name(request)
        except TurnRefused as refusal:
            return answer_json(Dialect.format_error(refusal.code, str(refusal)), 401)
        return list_model(self.model)

    async def _sample(self, dialect: type[Dialect], request: Request) -> SampledAnswer:
        name, body = self._read_name(request), await read_body(request)
        asked = read_request(dialect, body, self._past)
        while len(self._past) > MOST_PAST:
            self._past.popitem(last=False)
        context = self.context
        own = replace(context.sampling, max_tokens=context.limits.max_tokens)
        sampling, ignored = read_sampling(body, asked.sampling, own, context.renderer.decode)
        self._tell_ignored([*ignored, *asked.ignored])
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0" and asked.count == 1
        served, digest = self._find(name, asked.messages, is_retry=is_retry)
        served.requests[asked.name] += 1
        served.temperature = sampling.temperature
        seeds = self._draw_seeds(body, sampling, asked)
        turns = await self._sample_turns(request, served, asked, [replace(sampling, seed=s) for s in seeds], is_retry)
        if digest is not None:
            for turn in turns:
                served.ends.append(end := extend_digest(digest, turn.message))
                self._ends[end] = served
        self.answered += 1
        return SampledAnswer(asked, next(self._answers), self.model, turns, served.forest.renderer.decode)

    def _draw_seeds(self, body: Mapping[str, Any], sampling: SamplingParams, asked: Dialect) -> list[int]:
        """Return a seed for each turn; the client's own makes the same turns of the same conversation."""
        drawn = (next(self._draws),) if body.get("seed") is None else (sampling.seed, len(asked.messages))
        return [mix_seeds(self.context.sampling.seed, *drawn, index) for index in range(asked.count)]

    async def _sample_turns(
        self,
        request: Request,
        served: ServedConversation,
        asked: Dialect,
        wanted: Sequence[SamplingParams],
        is_retry: bool,
    ) -> list[SampledTurn]:
        clock = self.context.lanes.clock
        complete = partial(served.forest.complete, asked.messages, asked.tools, is_retry=is_retry)
        work = asyncio.ensure_future(gather_turns(complete(sampling=sampling) for sampling in wanted))
        self._working.add(work)
        served.answering += 1
        started = clock()
        try:
            return await unless_gone(request, work)
        except TurnRefused:
            if self._stopped and work.cancelled():
                raise TurnRefused("server_ends", "this server ends: nobody answers any more") from None
            raise
        except ValueError:  # of the request
            raise
        except Exception as error:
            self._tell_failure(error)
            raise TurnRefused("engine_failed", "the engine failed") from None
        finally:
            self._working.discard(work)
            served.answering -= 1
            served.since = clock()
            served.seconds += served.since - started

    def _find(
        self, name: str, messages: Sequence[Mapping[str, Any]], *, is_retry: bool
    ) -> tuple[ServedConversation, Digest | None]:
        """Find the conversation that a request goes on with, or begin one; return what its answer ends as well.

        One that is sent again goes on with what it began, where nothing else is open that began so.
        """
        if name:
            return self._named.get(name) or self._begin(name), None
        if not messages:
            raise TurnRefused("invalid_request", "messages: there is none to answer")
        try:
            digests = self._digests.digest(messages)
        except (KeyError, TypeError, AttributeError) as error:
            sentence = f"messages: one is not in the dialect's shape ({type(error).__name__}: {error})"
            raise TurnRefused("invalid_request", sentence) from None
        found = next((self._ends[one] for one in reversed(digests[:-1]) if one in self._ends), None)
        if found is None and is_retry:
            begun = [served for served in self._open.values() if served.opening == digests[-1]]
            found = begun[0] if len(begun) == 1 and begun[0].forest.turns <= 1 else None
        if found is None:
            found = self._begin("")
            found.opening = digests[-1]
        return found, digests[-1]

    def _begin(self, name: str) -> ServedConversation:
        context, number = self.context, next(self._numbers)
        seed = mix_seeds(context.sampling.seed, number)
        forest = ThreadForest(context, context.renderer, seed, f"served-{number}", goes_on_when_cut=True)
        now = context.lanes.clock()
        served = self._open[number] = ServedConversation(number, forest, name, began=now, since=now)
        if name:
            self._named[name] = served
        return served

    def _read_name(self, request: Request) -> str:
        """Return the name that a request gives its episode; empty: none. Raises TurnRefused: its key is wrong."""
        key, token = read_key(request), self.token
        shown, name = key[: len(token)], key[len(token) :]
        if token and not (secrets.compare_digest(shown.encode(), token.encode()) and name[:1] in ("", ".")):
            raise TurnRefused("invalid_api_key", f"this server wants its token: {HINT}")
        return _read_session(request) or (name[1:] if token else key)

    def _tell_failure(self, error: Exception) -> None:
        """Say, once, what was raised in the place of a turn."""
        line = next(reversed(str(error).strip().splitlines()), "")
        sentence = f"the engine failed, and clients are told so: {type(error).__name__}" + (f": {line}" if line else "")
        if sentence not in self._told:
            self._told.add(sentence)
            self.say(sentence)

    def _tell_ignored(self, names: Sequence[str]) -> None:
        if new := [n for n in names if n not in self._told]:
            self._told.update(new)
            self.say(f"a client asks for {', '.join(new)}: nothing here follows that")


def _read_session(request: Request) -> str:
    """Return the header X-Session-ID; UTF-8 is read as such, as clients send it, and anything else as Latin-1."""
    session: str = request.headers.get("x-session-id", "")
    try:
        return session.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return session
