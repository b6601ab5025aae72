"""The engine's contract: token ids in, sampled token ids with their logprobs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol, Self, runtime_checkable

from agentrl.runtime.activity import ProcessActivity
from agentrl.types import Completion, SamplingParams

LONGEST_PASS_S = 600.0  # a pass that takes longer is no sign of life


class Engine(Protocol):
    """Samples from the policy. Any number of ``generate`` calls run at once; each may be cancelled."""

    @property
    def capacity(self) -> int:
        """Return the number of sequences that it samples at the same time; further ones wait inside."""
        ...

    @property
    def max_context(self) -> int:
        """Return the length of the longest sequence (prompt and sampled tokens) that it can hold."""
        ...

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Continue ``token_ids``. Calls of one ``session`` mostly extend each other, so their cache may be kept."""
        ...

    def end_session(self, session: str) -> None:
        """Drop the cache of an episode that is over."""
        ...

    async def update_weights(self, policy: Any, version: int) -> None:
        """Sample from ``policy`` from now on, and stamp tokens with ``version``."""
        ...

    async def close(self) -> None: ...


@dataclass
class Meter:
    """The counters of an engine since it was made."""

    sampled: int = 0  # tokens
    prefilled: int = 0  # tokens of prompts that went through the model
    reused: int = 0  # tokens of prompts that were found in the cache
    passes: int = 0  # of an engine that counts them
    answers: int = 0  # of an engine elsewhere, when it was asked whether it is alive
    pass_since: float | None = None  # when the pass began that is being computed

    def signs_of_life(self) -> tuple[float, ...]:
        """Return numbers of which one changes while the engine works: a large model's pass may take long."""
        computing = self.pass_since is not None and perf_counter() - self.pass_since < LONGEST_PASS_S
        return self.sampled, self.prefilled, self.passes, self.answers, perf_counter() if computing else 0.0


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can lend its memory to the learner, between a phase of sampling and the next weights."""

    async def sleep(self) -> None: ...


@runtime_checkable
class MessageSender(Protocol):
    """An engine that says what happens to it while it runs: a server that is lost, or is back."""

    on_message: Callable[[str], None]


@runtime_checkable
class ServerLister(Protocol):
    """An engine of servers, which knows what each is at."""

    def list_servers(self, requests: Sequence[int] = ()) -> list[ProcessActivity]: ...


@runtime_checkable
class KeptTokensReporter(Protocol):
    """An engine that says which tokens each one was drawn among, where sampling leaves some out."""

    reports_kept: bool


@runtime_checkable
class RoutedExpertsReporter(Protocol):
    """An engine that says which experts a mixture's routers chose: `SamplingParams.routed_experts_start`."""

    returns_routed_experts: bool


def returns_routed_experts(engine: object) -> bool:
    """Return True for an engine that was made to say which experts its routers chose."""
    return isinstance(engine, RoutedExpertsReporter) and engine.returns_routed_experts


@runtime_checkable
class GrammarTaker(Protocol):
    """An engine that samples only what `SamplingParams.grammar` allows."""

    takes_grammars: bool


@runtime_checkable
class ShardReader(Protocol):
    """An engine elsewhere, which can be lent the weights layer by layer: no process has to hold the policy whole."""

    def read_shards(self, lender: Any) -> None: ...


@runtime_checkable
class TurnServing(Protocol):
    """An engine that is servers, which sample turns for whoever knows their addresses and keys."""

    def describe_servers(self) -> dict[str, Any] | None:
        """Return their addresses and keys as plain data, and what a request needs to know; None: ask the engine."""
        ...

    def list_up(self) -> list[bool]:
        """List, for each server in their order, whether it has the current weights: a lost one is asked for nothing."""
        ...


class OpenEngine(Engine, Protocol):
    """An engine as a run holds it open: entering it starts it, leaving it leaves nothing behind."""

    version: int

    @property
    def meter(self) -> Meter: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exception: object) -> None: ...
