"""The nouns. Standard library only: whoever writes an environment or a reward reads this file and no other."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from math import nan
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NotRequired, SupportsFloat, TypedDict, TypeGuard

if TYPE_CHECKING:
    from agentrl.renderer.stop_strings import StopStrings
    from agentrl.renderer.structured_outputs import OutputGrammar

Author = Literal["prompt", "model", "env"]
JsonSchema = dict[str, Any]
Span = tuple[int, int]  # from where to where: the second is behind the last
_FROM_CONTENT = "\0"  # known by its identity: a text that nobody gave


class _FunctionCall(TypedDict):
    name: str
    arguments: dict[str, Any]


class _MessageToolCall(TypedDict):
    """A tool call inside a message, in the shape of the OpenAI chat API."""

    id: str
    type: Literal["function"]
    function: _FunctionCall


class Message(TypedDict):
    """The OpenAI chat shape, which environment authors already know."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: NotRequired[list[_MessageToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]  # a thought, given beside the content; the run keeps it inside, between marks
    is_error: NotRequired[bool]  # of a tool's answer: true where it says why a call failed; no model is told


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asked for. ``error`` says, in words for the model, why it cannot be made.

    ``kind`` names what is wrong with it in a word: ``invalid``, ``unclosed``; it is empty for a sound one. ``span`` is
    its place, from where to where: in characters of the text that a `CallFormat` read, in tokens of the turn once a
    renderer has read it; None where a format does not say.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    kind: str = field(default="", compare=False)
    span: Span | None = field(default=None, compare=False)

    @classmethod
    def of(cls, name: str, /, **arguments: Any) -> ToolCall:
        """Return a call of a tool by its arguments, for an expert to yield; the rollout gives it its id."""
        return cls("", name, arguments)


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the model, read: what it thought, what it said, and its calls in the order they were asked.

    ``content`` is all but the calls, each thought between its marks; ``text`` is what was said beside the thoughts, and
    ``thought`` is what stands inside their marks. Where ``text`` is not given, both are read off ``content``.
    ``thought_spans`` and ``text_spans`` are their places in tokens of the turn, where a renderer has read it: thoughts
    with their marks, and what stands behind the last one, with the calls in it.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    thought: str = ""
    text: str = _FROM_CONTENT
    thought_spans: tuple[Span, ...] = field(default=(), compare=False)
    text_spans: tuple[Span, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.text is _FROM_CONTENT:
            object.__setattr__(self, "text", strip_thoughts(self.content))
            object.__setattr__(self, "thought", self.thought or get_thought(self.content))

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
                for c in self.tool_calls
            ]
        return message


ExpertTurn = str | ToolCall | Sequence[ToolCall] | Reply  # what `Env.expert` yields: a turn of the assistant's
Observation = str | Sequence[Message]
ERROR_PREFIX = "error: "  # how the answer to a failed call begins, as the model reads it
TOOL_ERRORS = ("parse", "unknown_tool", "arguments", "tool", "provoked")  # what may be wrong with a call
THOUGHT_MARKS = ("<think>", "</think>")
AdvantageValue = float | tuple[float, ...]  # the advantage of an episode, or of each of its turns


class Step(NamedTuple):
    """The result of ``Env.step``: Gymnasium's five."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, object]


class Stop(StrEnum):
    """The reason for the end of an episode."""

    TERMINATED = "terminated"  # the environment said so
    TRUNCATED = "truncated"  # the environment cut it short
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # a turn, or the context, ran out of tokens
    TIMEOUT = "timeout"  # the episode's deadline passed
    AGENT_ERROR = "agent_error"  # somebody else's agent ended by an error of its own
    FAULT = "fault"  # an infrastructure error


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling of one turn. ``temperature = 0`` is greedy; ``seed`` makes the turn's randomness its own.

    Logits are processed as transformers does: repetition penalty, temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    seed: int = 0
    min_p: float = 0.0  # of the most probable token's probability
    repetition_penalty: float = 1.0  # of the tokens in the context, prompt included
    stop: StopStrings | None = None  # texts that end the turn, beside the stop tokens
    grammar: OutputGrammar | None = field(default=None, compare=False)  # what the turn's text must match
    # tokens of the context whose routed experts are known: those of the others are wanted; None: none are
    routed_experts_start: int | None = None

    @property
    def truncates(self) -> bool:
        """Return True where a token is drawn among fewer than all. A greedy one is not drawn."""
        less = self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0 or self.grammar is not None
        return less and self.temperature > 0.0

    def greedy(self) -> SamplingParams:
        """Return the greedy sampling of the same turns: where they end stays, and what they must match."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            seed=self.seed,
            stop=self.stop,
            grammar=self.grammar,
        )


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The set of tokens that each sampled one was drawn among, where sampling leaves tokens out.

    A set is its token ids in order; one of many tokens is -1 and then 32 tokens a number, a bit each, the lowest first.

    Args:
        words: the distinct sets, one behind the other.
        ends: of each distinct set in ``words``.
        numbers: which of the distinct sets each sampled token has.
    """

    words: array[int]
    ends: array[int]
    numbers: array[int]

    def __post_init__(self) -> None:
        ends, numbers = [0, *self.ends], self.numbers
        ordered = ends == sorted(ends) and ends[-1] == len(self.words)
        if not ordered or min(numbers, default=0) < 0 or max(numbers, default=-1) >= len(self.ends):
            raise ValueError("sets of kept tokens that do not fit together")

    @classmethod
    def collect(cls, sets: Iterable[bytes]) -> KeptTokens:
        """Make it of each token's set, its numbers as the bytes of 32-bit integers."""
        distinct: dict[bytes, int] = {}
        numbers = array("i", [distinct.setdefault(one, len(distinct)) for one in sets])
        words, ends = array("i"), array("i")
        for one in distinct:
            words.frombytes(one)
            ends.append(len(words))
        return cls(words, ends, numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def cut(self, count: int) -> KeptTokens:
        """Return the sets of the first so many tokens."""
        return KeptTokens(self.words, self.ends, self.numbers[:count])

    def sets(self) -> list[array[int]]:
        """List each token's set; tokens with the same set have the same object."""
        distinct = [self.words[start:end] for start, end in pairwise([0, *self.ends])]
        return [distinct[number] for number in self.numbers]


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts that the routers of a mixture of experts chose, of tokens one behind the other.

    Args:
        experts: numbers of experts: of each token those of each layer that routes, best first or not; of 8 or 16 bits.
        layers: that route.
        top_k: experts of a token in a layer.
    """

    experts: array[int]
    layers: int
    top_k: int

    def __post_init__(self) -> None:
        if self.layers < 1 or self.top_k < 1 or len(self.experts) % (self.layers * self.top_k):
            raise ValueError(f"{len(self.experts)} experts are not those of tokens x {self.layers} x {self.top_k}")
        if self.experts.typecode not in ("B", "H"):
            raise ValueError(f"experts are numbers of 8 or 16 bits, not of array {self.experts.typecode!r}")

    def __len__(self) -> int:
        """Count the tokens."""
        return len(self.experts) // (self.layers * self.top_k)

    def take(self, start: int, stop: int) -> RoutedExperts:
        """Return those of the tokens from ``start`` to before ``stop``."""
        width = self.layers * self.top_k
        return RoutedExperts(self.experts[start * width : stop * width], self.layers, self.top_k)


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens that an engine sampled, stop tokens included; the three tuples have one entry a token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the distribution that was sampled from
    versions: tuple[int, ...]  # the policy version that sampled each token
    stop_reason: Literal["stop", "length"]
    kept: KeptTokens | None = None  # where sampling left tokens out, and the engine knows which
    # of the tokens before the last one, from ``SamplingParams.routed_experts_start`` on: of the prompt, and sampled
    routed_experts: RoutedExperts | None = None

    def cut(self, count: int) -> Completion:
        """Return the first so many tokens, as a turn that stopped there."""
        kept, routed = self.kept and self.kept.cut(count), self.routed_experts
        if routed is not None:
            routed = routed.take(0, max(len(routed) - (len(self.token_ids) - count), 0))
        return Completion(self.token_ids[:count], self.logprobs[:count], self.versions[:count], "stop", kept, routed)

    def segment(self) -> Segment:
        """Return the turn as a segment of its context."""
        return Segment("model", self.token_ids, self.logprobs, self.versions, self.kept, self.routed_experts)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens by one author.

    Model segments carry the engine's logprobs and the policy's versions; one without was demonstrated, not sampled.
    ``routed_experts`` are those of the tokens of the context before the segment's last one, as many as were not known
    before its turn. Nothing was sampled behind the last one, and so it was not routed.
    """

    author: Author
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    versions: tuple[int, ...] | None = None
    kept: KeptTokens | None = None  # of a model's segment, where sampling left tokens out
    routed_experts: RoutedExperts | None = None  # of a model's segment, where the engine says them

    def __post_init__(self) -> None:
        if self.routed_experts is not None and self.author != "model":
            raise ValueError(f"a {self.author} segment and routed_experts do not go together")
        if self.kept is not None and (self.author != "model" or len(self.kept) != len(self.token_ids)):
            raise ValueError(f"{len(self.kept)} sets of kept tokens for {len(self.token_ids)} of the {self.author}")
        if (self.logprobs is None) != (self.versions is None):
            raise ValueError("logprobs and versions go together")
        for values in (self.logprobs, self.versions):
            if values is not None and self.author != "model":
                raise ValueError(f"a {self.author} segment and logprobs/versions do not go together")
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(f"{len(values)} values for {len(self.token_ids)} tokens")


@dataclass(frozen=True, slots=True)
class Fault:
    """An infrastructure error: ``kind`` is counted, ``message`` is read by a person.

    ``provoked``: the episode's own request brought it about, so that it earns the floor. None: it is not known yet.
    """

    kind: str
    message: str
    provoked: bool | None = False


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A tool call as it went.

    ``status`` is ``ok``, a fault's kind, or one of `TOOL_ERRORS`, which are the model's mistakes: the call could not be
    parsed (``parse``), there is no such tool (``unknown_tool``), its arguments are wrong (``arguments``), the tool
    raised `ToolError` (``tool``), or failed on this request and works otherwise (``provoked``).
    """

    turn: int
    name: str
    status: str
    seconds: float
    span: Span | None = field(default=None, compare=False)  # in tokens of the turn; None where a format does not say

    @property
    def failed(self) -> bool:
        """Return True if the call failed by a mistake of the model's, so that it was told why."""
        return self.status in TOOL_ERRORS


class ThreadRole(StrEnum):
    """The way in which a thread of an episode comes to be."""

    MAIN = "main"
    SUB_AGENT = "sub-agent"  # a conversation of its own
    FORK = "fork"  # goes on from a turn that another thread went on from, or answers the same request again
    COMPACTION = "compaction"  # goes on for its parent with a shorter history, such as a summary
    REWRITE = "rewrite"  # goes on for its parent with a history that was written anew
    SIDE_CALL = "side call"  # one turn on its own, such as a title: seen, not trained


@dataclass(frozen=True, slots=True)
class Thread:
    """One context of an episode that has several: where it comes from, and what was said in it.

    Args:
        parent: the number of the thread that it comes from, which stands before it; None: of none.
        after: the number of the parent's turn that it was opened behind; None: of none.
        turns: the numbers of its turns, from 0, in the order of time over the whole episode.
        shared: the first so many messages are the parent's first ones too.
        messages: that were said in it, the shared ones included.
    """

    role: ThreadRole = ThreadRole.MAIN
    parent: int | None = None
    after: int | None = None
    turns: tuple[int, ...] = ()
    shared: int = 0
    messages: tuple[Message, ...] = ()

    @property
    def trained(self) -> bool:
        """Return True if its turns are the model's segments of its context."""
        return self.role is not ThreadRole.SIDE_CALL


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode: a row of segments, and what it was worth.

    A ``prompt`` segment begins a context: what the engine was given for a turn is all from the last one before it. An
    episode has one, or several where its history was written anew (``template.history``), or where an agent played it.
    ``threads`` says of each context where it comes from; it is empty where they are one conversation.

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
    shared_turns: int = 0  # the first so many were played once, for branches of which another counts them
    threads: tuple[Thread, ...] = ()

    def with_rewards(self, rewards: Mapping[str, float | None]) -> Trajectory:
        """Return this episode with more rewards, or others of the same names."""
        return replace(self, rewards={**self.rewards, **rewards})

    @property
    def contexts(self) -> list[tuple[Segment, ...]]:
        """Split the segments into contexts."""
        starts = [i for i, s in enumerate(self.segments) if s.author == "prompt" or not i]
        return [self.segments[a:b] for a, b in pairwise([*starts, len(self.segments)])]

    @property
    def token_ids(self) -> list[int]:
        """Return the tokens of all contexts, one behind the other."""
        return [t for s in self.segments for t in s.token_ids]

    @property
    def loss_mask(self) -> list[int]:
        """Return one entry a token: 1 where the engine sampled it, or an expert wrote it."""
        return [int(s.author == "model") for s in self.segments for _ in s.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """Return one entry a token: the engine's logprob where it sampled, 0.0 elsewhere; nan of a demonstration."""
        return [p for s in self.segments for p in (s.logprobs or (_without_logprob(s),) * len(s.token_ids))]

    @property
    def versions(self) -> list[int]:
        """Return one entry a token: the policy version where the engine sampled, -1 elsewhere."""
        return [v for s in self.segments for v in (s.versions or (-1,) * len(s.token_ids))]

    @property
    def kept(self) -> list[array[int] | None]:
        """Return one entry a token: the set it was drawn among, as `KeptTokens` has it; None where that was all."""
        return [one for s in self.segments for one in (s.kept.sets() if s.kept else [None] * len(s.token_ids))]

    @property
    def routed_experts(self) -> list[tuple[int, RoutedExperts]]:
        """List where the engine's routed experts are known: the place of their first token, and them."""
        return locate_routed_experts(self.segments)

    @property
    def turns(self) -> int:
        return sum(s.author == "model" for s in self.segments)

    @property
    def in_time(self) -> list[int]:
        """List the places of its turns in the order of time: threads stand one behind the other, and may interleave."""
        numbers = [n for thread in self.threads if thread.trained for n in thread.turns]
        places = range(self.turns)
        return sorted(places, key=numbers.__getitem__) if len(numbers) == self.turns else list(places)

    @property
    def observed(self) -> list[tuple[int, ...]]:
        """Return one entry a turn: the tokens before it, since the last turn; the prompt before the first.

        Of a later context it is what was new there, without the history, where the two stand apart.
        """
        observed: list[tuple[int, ...]] = []
        since: tuple[int, ...]
        since, before = (), ""
        for segment in self.segments:
            if segment.author == "model":
                observed.append(since)
                since = ()
            else:
                begins = segment.author == "prompt" or (before == "prompt" and observed)
                since = segment.token_ids if begins else since + segment.token_ids
            before = segment.author
        return observed

    @property
    def is_demonstration(self) -> bool:
        """Return True where an expert, a person or a file said what the model says, and no engine."""
        return any(s.author == "model" and s.logprobs is None for s in self.segments)

    @property
    def sampled_tokens(self) -> int:
        """Count the model's tokens; of a demonstration those that are to be its."""
        return sum(len(s.token_ids) for s in self.segments if s.author == "model")

    @property
    def own_tokens(self) -> int:
        """Count the sampled tokens without those of shared turns: over all episodes each token once.

        Those of a demonstration were not sampled.
        """
        turns = [len(s.logprobs or ()) for s in self.segments if s.author == "model"]
        return sum(turns[self.shared_turns :])

    @property
    def own_calls(self) -> tuple[CallRecord, ...]:
        """List the calls without those of shared turns: over all episodes each call once."""
        return tuple(c for c in self.calls if c.turn >= self.shared_turns)

    @property
    def answer(self) -> str:
        """Return the model's answer: the last assistant turn without its calls and without its thoughts."""
        return strip_thoughts(get_final_text(self.messages))

    @property
    def reward(self) -> float | None:
        """The weighted sum of the parts that apply; ``None`` where none does, or after an infrastructure error.

        After a fault that the episode provoked the parts are the floor.
        """
        parts = [self.weights.get(name, 1.0) * r for name, r in self.rewards.items() if r is not None]
        return sum(parts) if parts and not self.is_lost else None

    @property
    def is_lost(self) -> bool:
        """Return True if an infrastructure error ended it that was the world's: it says nothing about the model."""
        return self.fault is not None and not self.fault.provoked


def locate_routed_experts(segments: Iterable[Segment]) -> list[tuple[int, RoutedExperts]]:
    """List the routed experts of segments: the place of their first token among all tokens, and them."""
    located, end = [], 0
    for segment in segments:
        end += len(segment.token_ids)
        if segment.routed_experts:
            located.append((end - 1 - len(segment.routed_experts), segment.routed_experts))
    return located


def count_routed(segments: Sequence[Segment]) -> int:
    """Count the first tokens of the last context whose routed experts are known."""
    begin = max((i for i, s in enumerate(segments) if s.author == "prompt"), default=0)
    known = 0
    for place, routed in locate_routed_experts(segments[begin:]):
        if place > known:
            break
        known = max(known, place + len(routed))
    return known


def _without_logprob(segment: Segment) -> float:
    return nan if segment.author == "model" else 0.0


def find_failed_answers(messages: Sequence[Mapping[str, Any]], any_failed: bool) -> list[bool]:
    """Return, for each message of an episode, whether it answers a failed call.

    The verdict stands beside the text. Where no message has one and yet ``any_failed``, as the records of an older
    run tell, the text decides.
    """
    verdicts = [bool(m.get("is_error")) for m in messages]
    if any(verdicts) or not any_failed:
        return verdicts
    return [m.get("role") == "tool" and str(m.get("content")).startswith(ERROR_PREFIX) for m in messages]


def get_final_text(messages: Sequence[Message]) -> str:
    """Return the content of the last assistant message; empty if there is none."""
    return next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), "")


def strip_thoughts(text: str, marks: tuple[str, str] = THOUGHT_MARKS) -> str:
    """Return the text after the last thought that was ended, and before one that was not.

    It is the one notion of a turn's text beside its thoughts. A thought that the chat template opened begins with
    its mark in the message too, though the prompt holds it, so that one the model never ended is no answer.

    Args:
        marks: the opening and the end of a thought.
    """
    opening, ending = marks
    return text.rpartition(ending)[2].partition(opening)[0]


def join_thought(thought: str, text: str) -> str:
    """Write a thought in front of a text, between its marks."""
    return f"{THOUGHT_MARKS[0]}\n{thought}\n{THOUGHT_MARKS[1]}\n\n{text}"


def get_thought(text: str, marks: tuple[str, str] = THOUGHT_MARKS) -> str:
    """Return what stands inside the marks of a turn's thoughts, one that was not ended too; several in lines."""
    opening, ending = marks
    *ended, rest = text.split(ending)
    thoughts = [piece.partition(opening)[2] if opening in piece else piece for piece in ended]
    return "\n".join(t.strip() for t in [*thoughts, rest.partition(opening)[2]] if t.strip())


def to_utf8(text: str) -> str:
    """Replace by ``?`` what UTF-8 cannot hold: half a surrogate pair, which JSON lets a model write."""
    return text.encode("utf-8", "replace").decode("utf-8")


def to_utf8_json(value: Any) -> Any:
    """Apply `to_utf8` to every text in a JSON value."""
    if isinstance(value, str):
        return to_utf8(value)
    if isinstance(value, Mapping):
        return {to_utf8(str(k)): to_utf8_json(v) for k, v in value.items()}
    return [to_utf8_json(v) for v in value] if isinstance(value, list) else value


def is_number(value: Any) -> TypeGuard[SupportsFloat]:
    """Return True for a finite number of any kind: Python's, numpy's, a tensor's; a text is none."""
    try:
        return not isinstance(value, str | bytes | bytearray) and abs(float(value)) < float("inf")
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of several
        return False


@dataclass(frozen=True, slots=True)
class Group:
    """G episodes of one task."""

    task: int
    trajectories: tuple[Trajectory, ...]

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        """Return the members that count: those with a reward; a fault of the world's leaves none."""
        return tuple(t for t in self.trajectories if t.reward is not None)


@dataclass(frozen=True, slots=True)
class Sample:
    """One row ready for the learner: an episode. The lists have one entry a token.

    ``kept`` holds the set that a token was drawn among, as `KeptTokens` has it, or None; it is empty for all None.
    ``starts`` holds the places at which its contexts begin: no token of one sees another one's.
    ``routed_experts`` are those that the engine's routers chose: the place of their first token, and them.
    """

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    advantages: list[float]
    kept: Sequence[array[int] | None] = ()
    starts: Sequence[int] = (0,)
    routed_experts: Sequence[tuple[int, RoutedExperts]] = ()

    @property
    def contexts(self) -> list[list[int]]:
        """Split the tokens into contexts."""
        return [self.token_ids[a:b] for a, b in pairwise([*self.starts, len(self.token_ids)])]
