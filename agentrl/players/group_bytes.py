"""A group on its way from a player: what is decided on in the frame's header, the rest as JSON and arrays behind it.

header   of each member: task, stop, rewards, weights, step_rewards, metrics, fault, temperature, shared_turns
body     four lengths of four bytes; JSON: messages, calls, timings, info, threads, the segments' shapes;
         int32: token ids, versions, sets of kept tokens; float32 and float64: logprobs, in the narrower that holds
         them; bytes: routed experts, of 8 or 16 bits

Nothing is rounded, and reading a group runs nothing. It is read where somebody looks at it: the controller decides by
the header alone.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from typing import Any

from agentrl.players.connection import Fields, Shown
from agentrl.runs.episode_info import jsonable_info
from agentrl.runtime import worker_wire
from agentrl.types import (
    CallRecord,
    Fault,
    Group,
    KeptTokens,
    RoutedExperts,
    Segment,
    Stop,
    Thread,
    ThreadRole,
    Trajectory,
)

_LENGTHS = struct.Struct("<IIII")  # bytes of the JSON, numbers of int32, of float32, of float64
_SETS = ("words", "ends", "numbers")


def pack_group(group: Group) -> tuple[Fields, list[bytes]]:
    """Pack a group: fields of a frame's header, and the parts of its body."""
    numbers, narrow, wide, experts = array("i"), array("f"), array("d"), bytearray()
    members = [_pack_details(t, numbers, narrow, wide, experts) for t in group]
    details = json.dumps(members).encode()
    lengths = _LENGTHS.pack(len(details), len(numbers), len(narrow), len(wide))
    header = {"task": group.task, "members": [_pack_outcome(t) for t in group]}
    return header, [lengths, details, numbers.tobytes(), narrow.tobytes(), wide.tobytes(), bytes(experts)]


def unpack_group(header: Shown, body: bytes) -> Group:
    """Read what `pack_group` wrote. Raises ValueError: it is nothing that it writes."""
    try:
        size, integers, floats, doubles = _LENGTHS.unpack_from(body)
        at = _LENGTHS.size + size
        details = json.loads(body[_LENGTHS.size : at])
        single, double = at + 4 * integers, at + 4 * (integers + floats)
        end = double + 8 * doubles
        arrays = _Arrays(
            _read_array("i", body[at:single]),
            _read_array("f", body[single:double]),
            _read_array("d", body[double:end]),
            _read_array("B", body[end:]),
        )
        members = zip(header["members"], details, strict=True)
        return Group(header["task"], tuple(_unpack(outcome, detail, arrays) for outcome, detail in members))
    except (KeyError, TypeError, AttributeError, IndexError, struct.error, RecursionError) as error:
        raise ValueError(f"it is no group ({type(error).__name__}: {error})") from None


def _pack_outcome(t: Trajectory) -> Fields:
    """Describe what became of an episode. Its numbers may be numpy's, or tensors, as `is_number` takes them."""
    fault = t.fault and [t.fault.kind, t.fault.message, t.fault.provoked]
    return {
        "task": t.task,
        "stop": t.stop.value,
        "rewards": {name: None if value is None else float(value) for name, value in t.rewards.items()},
        "weights": {name: float(value) for name, value in t.weights.items()},
        "step_rewards": [float(value) for value in t.step_rewards],
        "metrics": {name: float(value) for name, value in t.metrics.items()},
        "fault": fault,
        "temperature": t.temperature,
        "shared_turns": t.shared_turns,
    }


def _pack_details(
    t: Trajectory, numbers: array[int], narrow: array[float], wide: array[float], experts: bytearray
) -> Fields:
    return {
        "segments": [_pack_segment(s, numbers, narrow, wide, experts) for s in t.segments],
        "messages": t.messages,
        "timings": dict(t.timings),
        "calls": [[c.turn, c.name, c.status, c.seconds, c.span] for c in t.calls],
        "info": _pack_info(t.info),
        "threads": [[x.role.value, x.parent, x.after, x.turns, x.shared, x.messages] for x in t.threads],
    }


def _pack_segment(
    s: Segment, numbers: array[int], narrow: array[float], wide: array[float], experts: bytearray
) -> list[Any]:
    numbers.extend(s.token_ids)
    shape: list[Any] = [s.author, len(s.token_ids)]
    if s.logprobs is None or s.versions is None:
        return shape
    single = array("f", s.logprobs)
    fits = tuple(single) == s.logprobs
    (narrow if fits else wide).extend(single if fits else s.logprobs)
    versions = set(s.versions)
    if len(versions) > 1:
        numbers.extend(s.versions)
    shape += ["f" if fits else "d", min(versions, default=0) if len(versions) < 2 else None]
    if s.kept is not None:
        parts = [getattr(s.kept, name) for name in _SETS]
        for part in parts:
            numbers.extend(part)
        shape.append([len(part) for part in parts])
    if (routed := s.routed_experts) is not None:
        experts += routed.experts.tobytes()
        own = [routed.experts.typecode, len(routed.experts), routed.layers, routed.top_k]
        shape += [own] if s.kept is not None else [None, own]
    return shape


def _pack_info(info: Shown) -> str:
    """Write ``Trajectory.info`` as it is where it is plain data, else as a run folder keeps it."""
    try:
        return worker_wire.pack_value(dict(info)).decode("utf-8", "surrogatepass")
    except worker_wire.NotPlainError:
        return worker_wire.pack_value(jsonable_info(info)).decode("utf-8", "surrogatepass")


def unpack_outcome(outcome: Shown) -> Fields:
    """Return the fields of a trajectory that the header has."""
    fault = outcome["fault"]
    return {
        "task": outcome["task"],
        "stop": Stop(outcome["stop"]),
        "rewards": outcome["rewards"],
        "weights": outcome["weights"],
        "step_rewards": tuple(outcome["step_rewards"]),
        "metrics": outcome["metrics"],
        "fault": Fault(*fault) if fault else None,
        "temperature": outcome["temperature"],
        "shared_turns": outcome["shared_turns"],
    }


class _Arrays:
    """The numbers of a group, which segments take one after the other."""

    def __init__(self, numbers: array[int], narrow: array[float], wide: array[float], experts: array[int]) -> None:
        self._arrays: dict[str, array[Any]] = {"i": numbers, "f": narrow, "d": wide, "B": experts}
        self._at = dict.fromkeys(self._arrays, 0)

    def take(self, kind: str, count: int) -> array[Any]:
        at = self._at[kind]
        if not 0 <= count <= len(self._arrays[kind]) - at:
            raise ValueError("it has fewer numbers than it says")
        self._at[kind] = at + count
        return self._arrays[kind][at : at + count]


def _unpack(outcome: Shown, detail: Shown, arrays: _Arrays) -> Trajectory:
    return Trajectory(
        **unpack_outcome(outcome),
        segments=tuple(_unpack_segment(shape, arrays) for shape in detail["segments"]),
        messages=tuple(detail["messages"]),
        timings=detail["timings"],
        calls=tuple(
            CallRecord(turn, name, status, seconds, span and (span[0], span[1]))
            for turn, name, status, seconds, span in detail["calls"]
        ),
        info=worker_wire.unpack_value(detail["info"].encode("utf-8", "surrogatepass")),
        threads=tuple(
            Thread(ThreadRole(role), parent, after, tuple(turns), shared, tuple(messages))
            for role, parent, after, turns, shared, messages in detail["threads"]
        ),
    )


def _unpack_segment(shape: Sequence[Any], arrays: _Arrays) -> Segment:
    author, count = shape[:2]
    token_ids = tuple(arrays.take("i", count))
    if len(shape) == 2:
        return Segment(author, token_ids)
    kind, version = shape[2:4]
    logprobs = tuple(arrays.take(kind, count))
    versions = tuple(arrays.take("i", count)) if version is None else (version,) * count
    kept = KeptTokens(*(arrays.take("i", n) for n in shape[4])) if len(shape) > 4 and shape[4] else None
    routed = _unpack_experts(shape[5], arrays) if len(shape) > 5 else None
    return Segment(author, token_ids, logprobs, versions, kept, routed)


def _unpack_experts(shape: Sequence[Any], arrays: _Arrays) -> RoutedExperts:
    kind, number, layers, top_k = shape
    if kind not in ("B", "H"):
        raise ValueError(f"it has routed experts of kind {kind!r:.20}")
    return RoutedExperts(_read_array(kind, arrays.take("B", number * array(kind).itemsize).tobytes()), layers, top_k)


def _read_array(kind: str, content: bytes) -> array[Any]:
    values = array(kind)
    values.frombytes(content)
    return values
