"""The comparison of two LaTeX expressions by math-verify, as it runs in a worker process."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

logging.disable(logging.CRITICAL)  # of this process alone: it says that it has no time-outs, which the caller has


def is_readable(latex: str) -> bool:
    """Return True if math-verify can read it."""
    return bool(_parsed(latex))


def same_worth(answer: str, gold: str) -> bool:
    """Return True if both can be read, and are worth the same."""
    return bool(_parsed(gold) and _parsed(answer) and verify(_parsed(gold), _parsed(answer), timeout_seconds=None))


@lru_cache(maxsize=256)
def _parsed(latex: str) -> Any:
    return parse(f"${latex}$", parsing_timeout=None)
