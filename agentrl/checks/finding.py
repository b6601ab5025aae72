"""The finding of a check: a verdict, the check's name, and a sentence with the way out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail", "skip"]  # skip: nothing was shown


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict; ``what`` is the check's name, ``why`` a sentence: the observation, and the way out."""

    verdict: Verdict
    what: str
    why: str


def ok(what: str, why: str) -> Finding:
    return Finding("ok", what, why)


def warn(what: str, why: str) -> Finding:
    return Finding("warn", what, why)


def fail(what: str, why: str) -> Finding:
    return Finding("fail", what, why)


def skip(what: str, why: str) -> Finding:
    return Finding("skip", what, why)


def failures(findings: list[Finding]) -> list[Finding]:
    """Select the findings whose verdict is ``fail``."""
    return [f for f in findings if f.verdict == "fail"]
