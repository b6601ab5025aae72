"""The judge of code: true answers are paid as they deserve, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import pytest
from agentrl_envs.rewards import Code

from agentrl import InfraError
from tests.helpers.submissions import RIGHT, SQUARE, THEFT


def fenced(source: str) -> str:
    return f"```python\n{source}\n```"


def judge(work: Callable[[Code], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        reward = Code(**settings)
        try:
            return await work(reward)
        finally:
            await reward.close()

    return anyio.run(main)


def score(rows: Sequence[tuple[str, Any, str | None]], **settings: Any) -> list[float | None]:
    async def work(reward: Code) -> list[float | None]:
        return list(await asyncio.gather(*(reward.score(fenced(c), t, f) for c, t, f in rows)))

    found: list[float | None] = judge(work, **settings)
    return found


def score_all(rows: dict[str, tuple[str, str]], **settings: Any) -> dict[str, float | None]:
    return dict(zip(rows, score([(c, t, None) for c, t in rows.values()], **settings), strict=True))


def test_right_answers_pass_statements_of_every_form() -> None:
    assert score_all(RIGHT, timeout_s=30) == dict.fromkeys(RIGHT, 1.0)


def test_nothing_but_a_true_answer_is_paid() -> None:
    found = score_all(THEFT, timeout_s=3)
    assert {n: s for n, s in found.items() if s != 0.0} == {}
    pairs = [(c, [[[2], 4]], "f") for n, (c, t) in THEFT.items() if t == "assert f(2) == 4"]
    assert score(pairs, timeout_s=3) == [0.0] * len(pairs)


def test_a_submission_that_reads_others_is_not_paid_beside_right_ones() -> None:
    """It looks for code and tests of others in frames, and in all that the collector knows, and says what it finds."""
    thief = r"""
import gc, re, sys
INSIDE = ("server", "dispatcher", "zygote", "walls", "__main__")
def find():
    frame = sys._getframe()
    while frame:
        yield from texts([frame.f_locals, frame.f_globals], 6)
        frame = frame.f_back
    for thing in gc.get_objects(): yield from texts(thing, 2)
def texts(x, deep):
    if isinstance(x, str): yield x
    elif isinstance(x, (bytes, bytearray)): yield bytes(x).decode('utf-8', 'replace')
    elif deep and isinstance(x, dict): yield from (t for v in list(x.values()) for t in texts(v, deep - 1))
    elif deep and isinstance(x, (list, tuple)): yield from (t for v in x for t in texts(v, deep - 1))
    elif deep and type(x).__module__ in INSIDE and hasattr(x, '__dict__'): yield from texts(vars(x), deep - 1)
def f(n):
    for text in find():
        if re.search(r'return n \* [n]', text): return pow(n, 2)
        if match := re.search(r'f\(%d\) == (\d+)' % n, text): return int(match[1])
    return 0
"""
    pairs = [[[n], n * n] for n in (2, 3, 7)]
    statements = "\n".join(f"assert f({n}) == {n * n}" for n in (2, 3, 7))
    for tests, function in ((pairs, "f"), (statements, None)):
        rows = [(SQUARE if n % 4 else thief, tests, function) for n in range(32)]
        assert score(rows, timeout_s=30) == [1.0 if n % 4 else 0.0 for n in range(32)]


def test_pairs_are_equal_as_json_has_it() -> None:
    equal = [(1, 1.0), ((1, 2), [1, 2]), ({1: 2}, {"1": 2}), (float("nan"), float("nan")), (2**70, 2**70), ("ä", "ä")]
    other = [
        (1, True),
        ([0], [False]),
        ({1}, [1]),
        (None, 0),
        ("1", 1),
        (2**70, 2**70 + 1),
        ({"a": 1}, {"a": 1, "b": 2}),
    ]
    for values, wanted in ((equal, 1.0), (other, 0.0)):
        rows = [
            (f"def f(): return {said!r}".replace("nan", "float('nan')"), [[[], right]], "f") for said, right in values
        ]
        assert score(rows, timeout_s=30) == [wanted] * len(values)


@pytest.mark.parametrize("function", ["f", "Solution().f"])
def test_a_function_may_be_a_method_of_a_solution(function: str) -> None:
    code = "class Solution:\n    def f(self, n): return n + 1"
    assert score([(code, [[[1], 2]], function)]) == [1.0]


def test_tests_that_can_judge_nobody_give_no_reward() -> None:
    tests = [
        "assert f(",
        "x = 1",
        "def verify(): assert f(2) == 4",
        "assert f(lambda: 1) == 1",
        "try: f(print)\nexcept BaseException: pass",
    ]
    assert score([(SQUARE, t, None) for t in tests], timeout_s=30) == [None] * len(tests)
    assert score([(SQUARE, "[[", "f"), (SQUARE, 3, "f"), (SQUARE, [[1, 2, 3]], "f")]) == [None] * 3


def test_a_sandbox_that_breaks_is_tried_again_alone_and_then_it_is_the_answers_fault() -> None:
    async def work(reward: Code) -> tuple[Any, ...]:
        await reward.load()
        judge = reward._judge
        assert judge is not None
        shared = judge.shared
        assert shared is not None
        run = shared.run
        broken: list[str] = []

        async def breaking(code: str, **how: Any) -> Any:
            if "BREAK" in code:
                broken.append(code)
                raise InfraError("sandbox_gone", "broken")
            return await run(code, **how)

        shared.run = breaking  # type: ignore[method-assign]
        innocent = await reward.score(fenced(f"{SQUARE}# BREAK"), [[[2], 4]], "f")
        assert judge.apart is not None
        apart_run, judge.apart.run = judge.apart.run, breaking  # type: ignore[method-assign]
        guilty = await reward.score(fenced(f"{SQUARE}# BREAK"), [[[2], 4]], "f")
        judge.apart.run = apart_run  # type: ignore[method-assign]

        async def dead(code: str, **how: Any) -> Any:
            raise InfraError("sandbox_gone", "dead")

        shared.run = judge.apart.run = dead  # type: ignore[method-assign]
        with pytest.raises(InfraError, match="dead"):
            await reward.score(fenced(SQUARE), "assert f(2) == 4")
        return innocent, guilty, len(broken)

    assert judge(work) == (1.0, 0.0, 3)
