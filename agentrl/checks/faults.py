"""Findings about episodes: faults, broken contracts, blocked event loops, infos that are no JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentrl.checks.finding import Finding, fail, ok, warn
from agentrl.checks.harness import LIMIT_S, EpisodeHarness
from agentrl.types import Fault, Trajectory

SHOWN = 3  # of a kind
ROUNDS = 3  # in which a function held up the event loop
LONG_S = 1.0  # in one
OUT = {
    "tool": "what the model did wrong is a ToolError, which it may read; anything else ends the episode",
    "env": "what a model writes may be anything; answer it, or end the episode, and raise nothing",
}


def check_contract(harness: EpisodeHarness) -> list[Finding]:
    """Return a finding for each broken contract."""
    sentences = list(harness.broken_contracts)[:SHOWN]
    return [fail("contract", s) for s in sentences] or [ok("contract", "what it returns is what its contract allows")]


def check_survives(played: Sequence[Trajectory], what: str = "survives") -> list[Finding]:
    """Return a finding for each kind of fault that ended an episode."""
    first = {
        _last_line(t.fault): t.fault for t in reversed(played) if t.fault is not None and t.fault.kind != "tool_open"
    }
    findings = [fail(what, f"{line}: {_way_out(fault)}") for line, fault in list(first.items())[:SHOWN] if fault]
    faults = sum(t.fault is not None for t in played)
    sentence = "none ended in a fault, whatever was said and called"
    return findings or [ok(what, f"{len(played)} episodes: {sentence}" if not faults else f"{faults} faults")]


def _last_line(fault: Fault) -> str:
    """Return the method and the last line of its traceback."""
    first, *_, last = fault.message.strip().splitlines() * 2
    where = first.partition(": Traceback")[0]
    return where[:300] if where == last or len(fault.message.splitlines()) == 1 else f"{where} raised {last:.200}"


def _way_out(fault: Fault) -> str:
    if fault.kind.endswith("_timeout"):
        return "the deadline passed; answer sooner, or give the tool a shorter one of its own"
    if fault.kind == "env_close":
        return "close must work whatever happened before, also after a reset that failed"
    return OUT["tool" if fault.kind.startswith("tool") else "env"]


def check_blocking(harness: EpisodeHarness) -> list[Finding]:
    """Return a finding for each function that blocked the event loop again and again, or once for long.

    Rounds in which the machine was busy do not count.
    """
    findings = [
        fail("blocking", sentence)
        for function, (sentence, seconds) in harness.blocking.items()
        if harness.rounds[function] >= ROUNDS or seconds >= LONG_S
    ]
    return findings[:SHOWN] or [ok("blocking", f"nothing held up the event loop for {LIMIT_S:g} s, again and again")]


def check_json(played: Sequence[Trajectory]) -> list[Finding]:
    """Return a finding for each message or info that cannot be written as JSON."""
    findings: dict[str, Finding] = {}
    for t in played:
        for message in t.messages:
            if (why := _no_json(message)) is not None:
                sentence = (
                    f"a message of the {message['role']} cannot be written as JSON ({why}); use text, numbers, lists"
                )
                findings.setdefault("message", fail("json", sentence))
        for key, value in t.info.items():
            if (why := _no_json(value)) is not None:
                kept = "the run's trajectories keep the name of its type alone"
                sentence = f"info[{key!r}] is {value!r:.60}, which is no JSON ({why}): {kept}"
                findings.setdefault(key, warn("json", sentence))
    return list(findings.values()) or [ok("json", "messages and infos can be written as JSON")]


def _no_json(value: Any) -> str | None:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return None
