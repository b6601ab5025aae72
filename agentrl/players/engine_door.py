"""The door to the run's own engine: players ask it for turns, and send the tokens that are new in a conversation.

An engine inside the trainer's process (the embedded one, vLLM in process) is reached through the controller's
connection alone. A request names how many tokens of the conversation so far still stand, and brings those behind them.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Self

from agentrl.players.connection import Fields, FrameStream, PlayerFrame, Shown
from agentrl.players.engine_frames import build_params, describe_params, pack_completion, unpack_completion
from agentrl.renderer import Renderer
from agentrl.rollout.engine_protocol import Engine, Meter
from agentrl.rollout.token_context import TokenContext
from agentrl.types import Completion, SamplingParams

Turn = Callable[[], Awaitable[tuple[Fields, list[bytes]]]]  # samples it; returns what `pack_completion` does


class EngineDoor:
    """The run's engine, as one player reaches it.

    Args:
        player: whose sessions these are.
        grammar: of every turn, where the run has one.
    """

    def __init__(self, engine: Engine, renderer: Renderer, player: str, grammar: Any = None) -> None:
        self._engine, self._renderer, self._player, self._grammar = engine, renderer, player, grammar
        self._contexts: dict[str, TokenContext] = {}

    def begin_turn(self, frame: PlayerFrame) -> Turn:
        """Return the turn that a frame asks for; its new tokens are taken in at once: the next one builds on them.

        Raises:
            ValueError: it builds on tokens that were not sent.
        """
        session, stands = frame.fields["session"], frame.fields["stands"]
        new = array("i")
        new.frombytes(frame.body)
        known = self._contexts.get(session)
        if stands > (0 if known is None else len(known)):
            raise ValueError(f"a turn goes on from {stands} tokens that were not sent")
        context = TokenContext() if known is None else known.take(stands)
        context.extend(new.tolist())
        self._contexts[session] = context
        params = build_params(frame.fields["params"], self._renderer.decode, self._grammar)
        return partial(self._sample, session, context.copy(), params)

    async def _sample(self, session: str, context: TokenContext, params: SamplingParams) -> tuple[Fields, list[bytes]]:
        try:
            completion = await self._engine.generate(context, params, session=self._name(session))
            return pack_completion(completion)
        finally:
            if session not in self._contexts:  # it was ended meanwhile, and the engine may have kept the turn since
                self._engine.end_session(self._name(session))

    def end_session(self, session: str) -> None:
        """Drop what is kept of a conversation."""
        if self._contexts.pop(session, None) is not None:
            self._engine.end_session(self._name(session))

    def close(self) -> None:
        """End all conversations of a player that is gone."""
        for session in list(self._contexts):
            self.end_session(session)

    def _name(self, session: str) -> str:
        return f"{self._player}/{session}"


class ForwardedEngine:
    """The run's engine in a player: what it is asked goes to the controller.

    Args:
        ask: sends a question and returns the frame that answers it.
    """

    def __init__(self, connection: FrameStream, ask: Any, described: Shown) -> None:
        self._connection, self._ask = connection, ask
        self.capacity, self.max_context = int(described["capacity"]), int(described["max_context"])
        self.meter, self.version = Meter(), 0
        self._sent: dict[str, TokenContext] = {}

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Sample a turn."""
        context = token_ids if isinstance(token_ids, TokenContext) else TokenContext(token_ids)
        before = self._sent.get(session)
        stands = len(before) if before is not None and context.extends(before) else 0
        self._sent[session] = context.copy()
        frame = await self._ask(
            "generate",
            (array("i", context[stands:]).tobytes(),),
            session=session,
            stands=stands,
            params=describe_params(params),
        )
        completion = unpack_completion(frame.fields, frame.body)
        self.meter.sampled += len(completion.token_ids)
        return completion

    def end_session(self, session: str) -> None:
        if self._sent.pop(session, None) is not None:
            self._connection.send("end_session", session=session)

    async def update_weights(self, policy: Any, version: int) -> None:
        """Leave it to the controller's engine, which is given them."""

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None: ...
