"""Contexts that are folded: past a budget the policy writes a summary, and a new context begins with it.

What is said to the model then is the prompt and the summary, as a context policy puts them together. The summary is a
turn of the episode's like any other: sampled once, in the context that it sums up, and trained with the episode's
reward. To the next context it is text, read as untrusted as a tool's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from agentrl.environments.task_sampler import describe_task
from agentrl.environments.validation import as_messages
from agentrl.errors import ConfigError, ContractError, author_errors
from agentrl.settings.entries import context
from agentrl.types import CallRecord, JsonSchema, Message, Observation, Segment, Thread, ThreadRole

if TYPE_CHECKING:
    from agentrl.rollout.episode import Episode

REQUEST = (
    "The conversation is about to be cut here. Call no tool now. Write a summary of what you did, found out and have "
    "still to do: you go on with the task and with it alone."
)
SUMMARY = "This is your summary of the work so far; go on from it:"
BeginContext = Callable[[Sequence[Message], str], Sequence[Message]]
CountTokens = Callable[[Sequence[Message], Sequence[JsonSchema]], int]


@context(explain="one context, however long it grows")
def whole(prompt: Sequence[Message], summary: str) -> list[Message]:
    """Keep the whole conversation in one context, which is never begun anew."""
    return list(prompt)


@context(explain="past rollout.context_budget tokens the policy writes a summary and goes on with it")
def fold(prompt: Sequence[Message], summary: str) -> list[Message]:
    """Begin a context with the prompt, and behind the task the summary."""
    return _say_behind(prompt, f"{SUMMARY}\n{summary}")


@dataclass(frozen=True)
class Folding:
    """The folding of a run's contexts.

    Args:
        begin: makes the messages that a context begins with, of the prompt's and the summary.
        budget: the tokens a context may have after the environment's answer, before it is folded.
        summary_tokens: the most tokens of a summary.
        measure: counts the tokens of a context, of its messages and tools; by default it is the episode's own tokens.
    """

    begin: BeginContext
    budget: int
    summary_tokens: int = 256
    measure: CountTokens | None = None


@dataclass
class FoldedContexts:
    """The contexts of one episode that is folded, while it runs."""

    folding: Folding
    prompt: Sequence[Message] = ()
    shared: int = 0  # messages of the present context that are the prompt's too
    messages: list[Message] = field(default_factory=list)  # of the present context
    ended: list[tuple[int, int, list[Message]]] = field(default_factory=list)  # turns so far, shared, messages
    asked: list[Message] | None = None  # while a summary is written: what the environment has answered before it

    def begin(self, episode: Episode) -> None:
        """Note the prompt. Raises ConfigError where the budget is too small for it, or too large for the engine."""
        self.prompt = list(episode.history)
        self.messages, self.shared = list(self.prompt), 0
        budget, most = self.folding.budget, episode.context.engine.max_context
        tokens = self._count_tokens(episode, self.messages, episode.tools)
        if tokens >= budget:
            whose = describe_task(episode.task, episode.context.split)
            raise ConfigError(
                f"rollout.context_budget {budget} is too small: the prompt of {whose} alone has {tokens} tokens; "
                "raise it"
            )
        if budget >= most:
            raise ConfigError(
                f"rollout.context_budget {budget} leaves no room for a summary in the {most} tokens that the engine "
                "can hold; lower it"
            )

    async def observe(self, episode: Episode, observation: Observation, tools: Sequence[JsonSchema]) -> bool:
        """Append an observation, and fold the context where it passes the budget and a turn may follow.

        Return False where no tokens are left for the summary.
        """
        mark, said = episode.mark_context(), list(episode.messages)
        episode._observe(observation, tools)
        turn, new = episode.messages[len(said) - 1], as_messages(observation)
        is_last = episode.turn + 1 >= episode.most_turns
        if is_last or self._count_tokens(episode, [*self.messages, turn, *new], tools) <= self.folding.budget:
            self.messages += [turn, *new]
            return True
        kept = list(episode.messages)
        episode.return_to(mark)
        episode._observe(_say_behind(new, REQUEST), tools)
        self.asked = list(new)
        sampled = await episode._sample_turn(self.folding.summary_tokens, len(self.ended) + 1)
        self.asked = None
        if sampled is None:
            episode.messages = kept
            return False
        reply, _ = sampled
        self.messages += [turn, *_say_behind(new, REQUEST), reply.message()]
        self.ended.append((_count_turns(episode.segments), self.shared, self.messages))
        episode.step_rewards.append(0.0)
        self._begin_next(episode, reply.text.strip())
        episode.messages = kept
        return True

    def _count_tokens(self, episode: Episode, messages: Sequence[Message], tools: Sequence[JsonSchema]) -> int:
        measure = self.folding.measure
        return len(episode.token_ids) if measure is None else measure(messages, tools)

    def _begin_next(self, episode: Episode, summary: str) -> None:
        with author_errors("the context policy of rollout.context"):
            begun = self.folding.begin(self.prompt, summary)
        if not isinstance(begun, (list, tuple)) or not begun:
            raise ContractError(f"a context policy returns the messages of a context; it returned {begun!r:.80}")
        self.messages = as_messages(list(begun))
        pairs = zip(self.messages, self.prompt, strict=False)
        self.shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        episode.begin_context(self.messages)

    def describe(self, episode: Episode) -> tuple[Thread, ...]:
        """Describe the threads of the episode; none where it has one context."""
        if not self.ended:
            return ()
        threads, first = list[Thread](), 0
        rest = (_count_turns(episode.segments), self.shared, self.messages + self._last_messages(episode))
        for number, (end, shared, messages) in enumerate([*self.ended, rest]):
            role, parent = (ThreadRole.COMPACTION, number - 1) if number else (ThreadRole.MAIN, None)
            after = first - 1 if number else None
            threads.append(Thread(role, parent, after, tuple(range(first, end)), shared, tuple(messages)))
            first = end
        return tuple(threads)

    def _last_messages(self, episode: Episode) -> list[Message]:
        """List what was said in the present context behind the messages that are noted."""
        return list(episode.history[len(self.messages) :])

    def place_calls(self, calls: Sequence[CallRecord]) -> list[int]:
        """Return each call's turn among all, with the summaries."""
        folds = [end - 1 for end, _, _ in self.ended]  # the summaries' turns
        turns = list[int]()
        for call in calls:
            turn = call.turn
            for summary in folds:
                turn += summary <= turn
            turns.append(turn)
        return turns


def is_summarized(messages: Sequence[Message]) -> bool:
    """Return True if the last of a context's messages is the summary that it was asked for."""
    asked = messages[-2] if len(messages) > 1 else None
    return asked is not None and asked["role"] == "user" and str(asked["content"]).endswith(REQUEST)


def _count_turns(segments: Sequence[Segment]) -> int:
    return sum(s.author == "model" for s in segments)


def _say_behind(messages: Sequence[Message], text: str) -> list[Message]:
    """Put a text behind messages: in the last one where it is a user's, as many templates take no two in a row."""
    if messages and messages[-1]["role"] == "user":
        last = messages[-1].copy()
        last["content"] = f"{last['content']}\n\n{text}"
        return [*messages[:-1], last]
    return [*messages, {"role": "user", "content": text}]
