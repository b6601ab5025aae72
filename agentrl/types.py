"""The nouns. Standard library only: whoever writes an environment or a reward reads this file and no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

Author = Literal["prompt", "model", "world"]
JsonSchema = dict[str, Any]


class FunctionCall(TypedDict):
    name: str
    arguments: dict[str, Any]


class MessageToolCall(TypedDict):
    """A tool call inside a message, in the shape of the OpenAI chat API."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict):
    """The OpenAI chat shape, which environment authors already know."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: NotRequired[list[MessageToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    refused: NotRequired[bool]  # of a tool's answer: true where it says why a call was refused; no model is told


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asked for. ``error`` says, in words for the model, why it cannot be made."""

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the model, read: its text without the calls, and the calls in the order they were asked."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
                for c in self.tool_calls
            ]
        return message


Observation = str | Sequence[Message]
REFUSAL = "error: "  # how a refusal begins, as the model reads it
THOUGHT_MARKS = ("<think>", "</think>")
Worth = float | tuple[float, ...]  # the advantage of an episode, or of each of its turns


class Step(NamedTuple):
    """What ``Env.step`` returns: Gymnasium's five."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Stop(StrEnum):
    """Why an episode ended."""

    TERMINATED = "terminated"  # the environment said so
    TRUNCATED = "truncated"  # the environment cut it short
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # a turn, or the context, ran out of tokens
    TIMEOUT = "timeout"  # the episode's deadline passed
    FAULT = "fault"  # the world failed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one turn is sampled. ``temperature = 0`` is greedy; ``seed`` makes the turn's randomness its own."""

    temperature: float = 1.0
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled. Stop tokens are included; the three tuples have one entry a token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the distribution that was sampled from
    versions: tuple[int, ...]  # the policy version that sampled each token
    stop_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens by one author. Model segments carry the engine's logprobs and the policy's versions."""

    author: Author
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    versions: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for values in (self.logprobs, self.versions):
            if (values is not None) != (self.author == "model"):
                raise ValueError(f"a {self.author} segment and logprobs/versions do not go together")
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(f"{len(values)} values for {len(self.token_ids)} tokens")


@dataclass(frozen=True, slots=True)
class Fault:
    """The world's failure: ``kind`` is counted, ``message`` is read by a person."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A tool call as it went. ``status`` is ``ok``, ``refused`` (the model's mistake) or a fault's kind."""

    turn: int
    name: str
    status: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode: a row of segments, and what it was worth.

    ``rewards`` holds named parts (``None``: does not apply), ``reward`` their weighted sum. ``metrics`` holds numbers
    that are logged beside them and are worth nothing.
    ``timings`` holds seconds by stage: ``reset``, ``render``, ``generate``, ``tools``, ``score``, ``total``.
    """

    task: int
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    stop: Stop
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    step_rewards: tuple[float, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    calls: tuple[CallRecord, ...] = ()
    fault: Fault | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    temperature: float | None = None  # it was sampled at; 0: greedy

    def with_rewards(self, rewards: Mapping[str, float | None]) -> Trajectory:
        """Return this episode with more rewards, or others of the same names."""
        return replace(self, rewards={**self.rewards, **rewards})

    @property
    def token_ids(self) -> list[int]:
        return [t for s in self.segments for t in s.token_ids]

    @property
    def loss_mask(self) -> list[int]:
        """One per token: 1 where the engine sampled it."""
        return [int(s.author == "model") for s in self.segments for _ in s.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """One per token: the engine's logprob where it sampled, 0.0 elsewhere."""
        return [p for s in self.segments for p in (s.logprobs or (0.0,) * len(s.token_ids))]

    @property
    def versions(self) -> list[int]:
        """One per token: the policy version where the engine sampled, -1 elsewhere."""
        return [v for s in self.segments for v in (s.versions or (-1,) * len(s.token_ids))]

    @property
    def turns(self) -> int:
        return sum(s.author == "model" for s in self.segments)

    @property
    def observed(self) -> list[tuple[int, ...]]:
        """One per turn: the tokens that came before it, since the last turn; the prompt before the first."""
        found: list[tuple[int, ...]] = []
        since: tuple[int, ...] = ()
        for segment in self.segments:
            if segment.author == "model":
                found.append(since)
            since = () if segment.author == "model" else since + segment.token_ids
        return found

    @property
    def sampled_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.segments if s.author == "model")

    @property
    def answer(self) -> str:
        """What the model said last: the last assistant turn without its calls and without its thoughts."""
        return without_thoughts(final_text(self.messages))

    @property
    def reward(self) -> float | None:
        """The weighted sum of the parts that apply; ``None`` where none does, or where the world failed."""
        parts = [self.weights.get(name, 1.0) * r for name, r in self.rewards.items() if r is not None]
        return sum(parts) if parts and self.fault is None else None


def refused_answers(messages: Sequence[Mapping[str, Any]], calls_refused: bool) -> list[bool]:
    """Return, for each message of an episode, whether it answers a call that was refused.

    The verdict stands beside the text. Where no message has one and yet ``calls_refused``, as the records of an older
    run tell, the text decides.
    """
    verdicts = [bool(m.get("refused")) for m in messages]
    if any(verdicts) or not calls_refused:
        return verdicts
    return [m.get("role") == "tool" and str(m.get("content")).startswith(REFUSAL) for m in messages]


def final_text(messages: Sequence[Message]) -> str:
    """The content of the last assistant message; empty if there is none."""
    return next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), "")


def without_thoughts(text: str, marks: tuple[str, str] = THOUGHT_MARKS) -> str:
    """Return what stands after the last thought that was ended, and before one that was not.

    It is the one notion of what a turn says beside its thoughts. A thought that the chat template opened begins with
    its mark in the message too, though the prompt holds it, so that one the model never ended is no answer.

    Args:
        marks: what opens and what ends a thought.
    """
    opening, ending = marks
    return text.rpartition(ending)[2].partition(opening)[0]


def utf8(text: str) -> str:
    """The text with ``?`` for what UTF-8 cannot hold: half a surrogate pair, which JSON lets a model write."""
    return text.encode("utf-8", "replace").decode("utf-8")


def utf8_within(value: Any) -> Any:
    """`utf8` of every text in a JSON value."""
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, Mapping):
        return {utf8(str(k)): utf8_within(v) for k, v in value.items()}
    return [utf8_within(v) for v in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Group:
    """G episodes of one task."""

    task: int
    trajectories: tuple[Trajectory, ...]

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        """The members that count: no fault, and a reward."""
        return tuple(t for t in self.trajectories if t.reward is not None)


@dataclass(frozen=True, slots=True)
class Sample:
    """One row ready for the learner; the four lists have one entry a token."""

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    advantages: list[float]
