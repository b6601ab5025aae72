"""The writer of episodes: a Parquet file a step, a row an episode, by one schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.credit import Credit, EpisodeCredit
from agentrl.runs.episode_info import (
    find_expected_answer,
    find_last_answer,
    find_question,
    jsonable_info,
    shorten_to_line,
)
from agentrl.settings.secret import scrub
from agentrl.types import CallRecord, Message, Thread, ThreadRole, Trajectory, to_utf8

SCHEMA_VERSION = "7"
READABLE = ("6", SCHEMA_VERSION)  # 6 had no threads; 5 had the author "world" and the status "refused"
_NAMED = pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))
_SEGMENT = pa.struct(
    [
        ("author", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),  # null where no engine sampled it: others' tokens, and demonstrations
        ("versions", pa.list_(pa.int32())),
        ("learner_logprobs", pa.list_(pa.float32())),  # before the update; null where it was not trained
        ("loss_gradients", pa.list_(pa.float32())),  # d loss / d logprob at the first update, likewise
        ("corrections", pa.list_(pa.float32())),  # the weights of the importance-sampling rule, likewise
    ]
)
_CALL = pa.struct(
    [
        ("turn", pa.int32()),
        ("name", pa.string()),
        ("status", pa.string()),
        ("seconds", pa.float64()),
        ("start", pa.int32()),  # its tokens in the turn, from where to where; null where the call format does not say
        ("end", pa.int32()),
    ]
)
_THREAD = pa.struct(
    [
        ("role", pa.string()),
        ("parent", pa.int32()),  # its number among the threads; null: of none
        ("after", pa.int32()),  # the number of the parent's turn that it was opened behind; null: of none
        ("turns", pa.list_(pa.int32())),  # numbers of its turns, in the order of time over the episode
        ("shared", pa.int32()),  # so many first messages are the parent's
        ("messages", pa.string()),  # JSON: those behind the shared ones
    ]
)
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("split", pa.string()),
        ("task", pa.int64()),
        ("sample", pa.int32()),
        ("reward", pa.float64()),  # null: not scored, or lost to a fault; the floor of one that it provoked
        ("rewards", _NAMED),
        ("weights", _NAMED),  # of the components; 1.0 for one that is not named
        ("step_rewards", pa.list_(pa.float64())),
        ("credit", pa.string()),  # trained, or why not: agentrl.credit
        ("advantage", pa.float64()),  # the mean of the turns' where each has its own; null: it has none
        ("advantages", pa.list_(pa.float64())),  # one a turn
        ("weight", pa.float64()),  # of each of its trained tokens in the loss; null: it is in no denominator
        ("stop", pa.string()),
        ("fault", pa.string()),  # its kind
        ("fault_message", pa.string()),
        ("segments", pa.list_(_SEGMENT)),
        ("messages", pa.string()),  # JSON
        ("calls", pa.list_(_CALL)),
        ("timings", _NAMED),  # seconds
        ("info", pa.string()),  # JSON: what reset and steps returned, at most 8,000 characters
        ("question", pa.string()),  # the last user message before the first turn, in one line of at most 200 characters
        ("answer", pa.string()),  # the end of what the model said last, likewise
        ("expected", pa.string()),  # the right answer, where info names it, likewise
        ("temperature", pa.float64()),  # it was sampled at; 0: greedy
        ("shared_turns", pa.int32()),  # so many first turns are another branch's too, which counts them
        ("threads", pa.list_(_THREAD)),  # one a context, where an agent has several; else empty
    ],
    metadata={"agentrl_trajectories": SCHEMA_VERSION},
)


class LearnedTokens(NamedTuple):
    """The learner's numbers of an episode's sampled tokens at the first update, in order: one entry a token."""

    logprobs: Sequence[float]  # before it
    gradients: Sequence[float]  # d loss / d logprob: weight, correction and KL term included
    corrections: Sequence[float]  # weights of the importance-sampling rule


Learned = Sequence[Sequence[LearnedTokens | None]]  # of each member of each group; None: it was not trained


def write_episodes(path: Path, step: int, split: str, credit: Credit, learned: Learned = ()) -> None:
    """Write a step's episodes to one file; the arguments are those of ``RunFolder.write_trajectories``.

    Raises:
        OSError: it cannot be written.
    """
    learned = learned or [[None] * len(entries) for entries in credit.entries]
    rows = [
        _row(step, split, member, entry, own)
        for entries, group in zip(credit.entries, learned, strict=True)
        for member, (entry, own) in enumerate(zip(entries, group, strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path, compression="zstd")


def _row(step: int, split: str, member: int, entry: EpisodeCredit, learned: LearnedTokens | None) -> dict[str, Any]:
    t = entry.trajectory
    return {
        "step": step,
        "split": split,
        "task": t.task,
        "sample": member,
        "reward": t.reward,
        "rewards": _named(t.rewards.items()),
        "weights": _named(t.weights.items()),
        "step_rewards": list(t.step_rewards),
        "credit": entry.outcome,
        "advantage": entry.mean_advantage,
        "advantages": entry.turn_advantages(),
        "weight": entry.weight,
        "stop": t.stop.value,
        "fault": t.fault.kind if t.fault else None,
        "fault_message": to_utf8(scrub(t.fault.message)) if t.fault else None,
        "segments": _segments(t, learned),
        "messages": _dump_messages(t.messages),
        "calls": [_call(c) for c in t.calls],
        "timings": _named(t.timings.items()),
        "info": scrub(json.dumps(jsonable_info(t.info), ensure_ascii=False)),
        "question": shorten_to_line(_find_question(t)),
        "answer": shorten_to_line(find_last_answer(t), end=True),
        "expected": shorten_to_line(find_expected_answer(t.info), end=True),
        "temperature": t.temperature,
        "shared_turns": t.shared_turns,
        "threads": [_thread(one) for one in t.threads],
    }


def _segments(trajectory: Trajectory, learned: LearnedTokens | None) -> list[dict[str, Any]]:
    """Make the rows of the segments; each of the model's takes its own stretch of ``learned``."""
    rows, at = [], 0
    for s in trajectory.segments:
        own = None if learned is None or s.author != "model" else slice(at, at + len(s.token_ids))
        at += len(s.token_ids) if own else 0
        rows.append(
            {
                "author": s.author,
                "token_ids": s.token_ids,
                "logprobs": s.logprobs,
                "versions": s.versions,
                "learner_logprobs": learned.logprobs[own] if learned and own else None,
                "loss_gradients": learned.gradients[own] if learned and own else None,
                "corrections": learned.corrections[own] if learned and own else None,
            }
        )
    return rows


def _find_question(t: Trajectory) -> str:
    """Find the question; of an agent's episode that of its first conversation."""
    main = next((one for one in t.threads if one.role is ThreadRole.MAIN), None)
    return find_question(t.messages, t.turns) if main is None else find_question(main.messages, len(main.turns))


def _thread(thread: Thread) -> dict[str, Any]:
    return {
        "role": thread.role.value,
        "parent": thread.parent,
        "after": thread.after,
        "turns": thread.turns,
        "shared": thread.shared,
        "messages": _dump_messages(thread.messages[thread.shared :]),
    }


def _dump_messages(messages: Sequence[Message]) -> str:
    return to_utf8(scrub(json.dumps(messages, ensure_ascii=False)))


def _call(call: CallRecord) -> dict[str, Any]:
    start, end = call.span or (None, None)
    named = {"turn": call.turn, "name": to_utf8(call.name), "status": call.status, "seconds": call.seconds}
    return {**named, "start": start, "end": end}


def _named(items: Iterable[tuple[str, float | None]]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in items]
