"""Are two mathematical expressions the same? What a look does not tell is asked of math-verify, in a process.

math-verify stops itself by signals, which raise in threads, and some expressions hold it for ever: so it works in
another process, which is killed with its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import anyio
import anyio.lowlevel

from agentrl import UserError
from agentrl.processes import WorkerEnded, call_in_process
from agentrl.rewards import per_episode
from agentrl.types import without_thoughts
from agentrl_envs.rewards.answers import Completion, boxed, same, text_of

TIMEOUT_S = 5.0
START_S = 30.0  # the first one imports sympy
MAX_CHARS = 1_000  # of an answer that is looked at


@per_episode
async def math(completions: Sequence[Completion], solution: Sequence[Any], **_: Any) -> list[float | None]:
    r"""1.0 where the last ``\boxed{}`` is worth as much as the column ``solution``: ``1/2`` is ``0.5``.

    ``None`` where a row has no solution. An answer that takes over five seconds is not the solution.

    Raises:
        UserError: math-verify is not installed.
    """
    return [await _one(text_of(c), s) for c, s in zip(completions, solution, strict=True)]


async def _one(text: str, solution: Any) -> float | None:
    if solution is None:
        return None
    wanted, answer = str(solution), boxed(without_thoughts(text))
    wanted = boxed(wanted) or wanted
    if answer is None:
        return 0.0
    return float(await equal(answer, wanted))


async def equal(answer: str, wanted: str, timeout_s: float = TIMEOUT_S) -> bool:
    """The fast way where it says yes, or where both are plain numbers; else math-verify's word."""
    if same(answer, wanted):
        return True
    if len(answer) > MAX_CHARS or not answer or (_plain(answer) and _plain(wanted)):
        return False
    _check_installed()
    await _warm_up()
    try:
        return await call_in_process(_verified, answer, wanted, timeout_s=timeout_s)
    except TimeoutError:
        return False
    except WorkerEnded:  # it brought its process down
        return False


def _plain(text: str) -> bool:
    """A number without any mathematics: comparing those is done."""
    return all(c in "0123456789.,+- $" for c in text)


@lru_cache(maxsize=1)
def _check_installed() -> None:
    if find_spec("math_verify") is None:
        raise UserError("reward 'math' needs the package math-verify: pip install 'agentrl-gym[math]'")


_warm = anyio.lowlevel.RunVar[bool]("agentrl_math_warm")


async def _warm_up() -> None:
    """Once a run: a process that has imported what it takes, outside of anybody's deadline."""
    if not _warm.get(False):
        _warm.set(True)
        with anyio.move_on_after(START_S):
            await call_in_process(_verified, "1", "2")


def _verified(answer: str, wanted: str) -> bool:
    """In the other process."""
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    gold = parse(f"${wanted}$", parsing_timeout=None)
    said = parse(f"${answer}$", parsing_timeout=None)
    return bool(gold and said and verify(gold, said, timeout_seconds=None))
