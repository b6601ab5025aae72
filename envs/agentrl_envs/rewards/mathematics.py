"""The comparison of two mathematical expressions: by their text where that tells, else by math-verify in a process.

math-verify stops itself by signals, which raise in threads, and some expressions hold it for ever: so it works in
another process, within limits of processor time and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl import UserError
from agentrl.rewards.functions import per_episode
from agentrl.runtime.processes import call_in_process
from agentrl.types import THOUGHT_MARKS, strip_thoughts
from agentrl_envs.rewards.answers import Completion, Marks, get_text
from agentrl_envs.rewards.notation import find_stated_answer
from agentrl_envs.rewards.values import Expression, is_equal, read_answer, read_gold, to_latex

CPU_S = 5.0
WALL_S = 120.0  # of a call that waits for a processor
MEMORY_BYTES = 1 << 30
MAX_KNOWN = 65_536  # golds of which it is known whether they can be read


@per_episode
async def math(
    completions: Sequence[Completion], solution: Sequence[Any], thought_marks: Marks = THOUGHT_MARKS, **_: Any
) -> list[float | None]:
    r"""1.0 where the last ``\boxed{}`` is worth as much as the column ``solution``: ``1/2`` is ``0.5``.

    ``None`` where a solution cannot be read, whatever the answer. An answer that cannot be read, or takes over five
    seconds of computing, is not the solution.
    """
    texts = [strip_thoughts(get_text(c), thought_marks) for c in completions]
    return [await judge_math(text, s) for text, s in zip(texts, solution, strict=True)]


math.needs = {"math_verify": "math"}  # type: ignore[attr-defined]


async def judge_math(text: str, solution: Any) -> float | None:
    """Return 1.0 where a text's answer is the solution, 0.0 where not, ``None`` where the solution cannot be read."""
    gold = read_gold(solution)
    if gold is None or (isinstance(gold.value, Expression) and not await _is_readable(gold.latex)):
        return None
    said = find_stated_answer(text)
    answer = None if said is None else read_answer(said)
    if said is None or answer is None:
        return 0.0
    same = is_equal(answer, gold.value)
    return float(await _in_worker("same_worth", to_latex(said), gold.latex) if same is None else same)


_readable: dict[str, bool] = {}


async def _is_readable(gold: str) -> bool:
    if gold not in _readable:
        if len(_readable) > MAX_KNOWN:
            _readable.clear()
        _readable[gold] = await _in_worker("is_readable", gold)
    return _readable[gold]


async def _in_worker(name: str, *arguments: str) -> bool:
    """Call a function of `algebra` in a worker process; False if it takes too much, or raises."""
    function = f"agentrl_envs.rewards.algebra:{name}"
    try:
        return bool(
            await call_in_process(
                function, *arguments, timeout_s=WALL_S, cpu_s=CPU_S, memory_bytes=MEMORY_BYTES, reads_others=True
            )
        )
    except UserError:  # it cannot be imported there
        raise
    except Exception:  # other people's code, given text that anybody wrote
        return False
