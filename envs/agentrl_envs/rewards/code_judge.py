"""The judge of code: the submission in one process, its tests in another, or here; plain values between them."""

from __future__ import annotations

import asyncio
import base64
import json
import marshal
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from agentrl_tools.sandbox import launch
from agentrl_tools.sandbox.fork_server_client import (
    CodeResult,
    ForkServerClient,
    get_default_concurrency,
    open_fork_server,
)

from agentrl import InfraError
from agentrl_envs.rewards.inside import plain_data

_PACKAGE = "agentrl_envs.rewards.inside"
_SUBMISSION, _EXAMINER = ("plain_data", "submission"), ("plain_data", "examiner")
_ANALYSIS = (*_EXAMINER, "analysis")
_IMPORTED = ("base64", "collections", "itertools", "json", "typing", "zlib")  # by our modules, in each session
PART = 60_000  # characters of code that a session is sent at once
MAX_QUESTIONS = 10_000  # of a test to its submission
LONGER = 16  # times as many characters as are expected: no equal answer has more
KEPT = 1_024  # tests whose analysis is remembered
_numbers = count()


class TestsError(Exception):
    """The tests cannot judge any answer; the sentence says why."""

    __test__ = False


class _Failed(Exception):
    """The submission's process, or its tests', came to no end: it took too long, or died."""


class CodeJudge:
    """A sandbox for submissions and their tests, started at its first use.

    Where it breaks, an answer is judged again with no other beside it. One that breaks it again has failed.

    Args:
        timeout_s: of all that an answer is judged by.
    """

    def __init__(self, kind: launch.SandboxKind, packages: Sequence[str], timeout_s: float) -> None:
        self.kind, self.packages, self.timeout_s = kind, tuple(packages), timeout_s
        self.held = AsyncExitStack()
        self.opening, self.alone = asyncio.Lock(), asyncio.Lock()
        self.places = asyncio.Semaphore(get_default_concurrency())
        self.shared: ForkServerClient | None = None
        self.apart: ForkServerClient | None = None
        self.known: OrderedDict[str, dict[str, plain_data.Data]] = OrderedDict()

    async def start(self) -> None:
        """Start the sandbox. Raises UserError where there is none."""
        async with self.opening:
            if self.shared is None:
                self.shared = await self._open()

    async def close(self) -> None:
        self.shared = self.apart = None
        await self.held.aclose()

    async def compare(self, code: str, function: str, pairs: Sequence[Sequence[plain_data.Value]]) -> list[bool]:
        """Compare a function's results with what is expected of it, for pairs of arguments and result.

        Raises:
            InfraError: the sandbox fails, and not by what is judged.
        """
        calls = [["call", {"n": function}, [_encode(v) for v in given], {}] for given, _ in pairs]
        said = await self._judge(lambda sandbox: _collect(sandbox, code, calls, self.timeout_s))
        return await asyncio.to_thread(_compare_all, said or [None] * len(pairs), [right for _, right in pairs])

    async def passes(self, code: str, tests: str) -> bool:
        """Return whether statements run to their end, with the submission in another process.

        Raises:
            InfraError: the sandbox fails, and not by what is judged; TestsError: no answer could pass.
        """
        plan = await self._analyze(tests)
        verdict = await self._judge(lambda sandbox: _examine(sandbox, code, tests, plan, self.timeout_s))
        if verdict is None:
            return False
        if verdict["unjudgeable"] is not None:
            raise TestsError(verdict["unjudgeable"])
        return bool(verdict["passed"])

    async def _analyze(self, tests: str) -> dict[str, plain_data.Data]:
        if tests not in self.known:
            task = f"print(analysis.analyze({tests!a}))"
            plan = await self._judge(lambda sandbox: _run_analysis(sandbox, task, self.timeout_s))
            if plan is None:
                raise TestsError(f"the tests cannot be read in {self.timeout_s:g} s")
            self.known[tests] = plan
            if len(self.known) > KEPT:
                self.known.popitem(last=False)
        self.known.move_to_end(tests)
        plan = self.known[tests]
        if "error" in plan:
            raise TestsError(plan["error"])
        return plan

    async def _judge(self, work: Any) -> Any:
        """Run work in the shared sandbox; if that breaks, once more alone. ``None``: it failed."""
        await self.start()
        assert self.shared is not None
        try:
            async with self.places:
                return await work(self.shared)
        except _Failed:
            return None
        except InfraError:
            pass  # its own fault, or another's: alone, it is its own
        async with self.alone:
            if self.apart is None:
                self.apart = await self._open()
            try:
                return await work(self.apart)
            except _Failed:
                return None
            except InfraError:
                await self.apart.run("1 + 1", session=None, timeout_s=self.timeout_s)  # raises where nothing works
                return None

    async def _open(self) -> ForkServerClient:
        limits = launch.SandboxLimits(output_bytes=2 << 20, cpu_s=int(self.timeout_s) + 2)
        start = launch.choose_launch(self.kind, limits, (*_IMPORTED, *self.packages))
        return await self.held.enter_async_context(open_fork_server(start))


async def _collect(
    sandbox: ForkServerClient, code: str, calls: Sequence[plain_data.Data], timeout_s: float
) -> list[str | None] | None:
    async with _open_session(sandbox, _get_time() + timeout_s, _SUBMISSION) as session:
        return _read_answers(await session.run(_define(code, calls), last=True), len(calls))


async def _examine(
    sandbox: ForkServerClient, code: str, tests: str, plan: dict[str, plain_data.Data], timeout_s: float
) -> dict[str, plain_data.Data] | None:
    ready = plan["ready"]
    while True:
        lasting = not plan["complete"]
        said = await _relay(sandbox, code, tests, {**plan, "ready": ready}, timeout_s, lasting)
        if said is None or not (said.get("deviated") or "ask" in said):
            return said
        plan, ready = {**plan, "complete": False}, []  # the statements went another way than it seemed


async def _relay(
    sandbox: ForkServerClient, code: str, tests: str, plan: dict[str, plain_data.Data], timeout_s: float, lasting: bool
) -> dict[str, plain_data.Data] | None:
    """Run the statements, and pass what they ask to the submission and its answers back. ``None``: it has failed.

    Args:
        lasting: the processes last beyond what seems to be all that is asked.
    """
    deadline, ready = _get_time() + timeout_s, plan["ready"]
    async with AsyncExitStack() as held:
        submission = await held.enter_async_context(_open_session(sandbox, deadline, _SUBMISSION))
        examiner = await held.enter_async_context(_open_session(sandbox, deadline, _EXAMINER))
        first = [["names", {}, plan["names"], {}], *map(json.loads, ready)]
        output = await submission.run(_define(code, first), last=not lasting)
        names, *answers = _read_answers(output, len(first))
        if names is None:
            return None
        known = [(request, answer) for request, answer in zip(ready, answers, strict=True) if answer is not None]
        arguments = f"{tests!a}, {plan['names']!a}, {names!a}, {plan['modules']!r}, {known!a}, {plan['calls']}"
        said = await examiner.ask(f"_e = examiner.Examiner({arguments})\n_e.start()", last=not lasting)
        for _ in range(MAX_QUESTIONS if lasting else 0):
            if "ask" not in said:
                break
            request = f"[{said['ask']}]"
            (answer,) = _read_answers(await submission.run(f"_s.handle({request!a})"), 1)
            if answer is None:
                return None
            said = await examiner.ask(f"_e.resume({answer!a})")
    return None if lasting and "ask" in said else said


async def _run_analysis(sandbox: ForkServerClient, task: str, timeout_s: float) -> dict[str, plain_data.Data]:
    async with _open_session(sandbox, _get_time() + timeout_s, _ANALYSIS) as session:
        return await session.ask(task, last=True)


class _JudgedProcess:
    """A session of the sandbox, with modules of ours in it."""

    def __init__(self, sandbox: ForkServerClient, deadline: float, modules: tuple[str, ...]) -> None:
        self.sandbox, self.deadline, self.modules = sandbox, deadline, modules
        self.name = f"judge-{next(_numbers)}"
        self.generation: int | None = None

    async def run(self, code: str, *, last: bool = False) -> str:
        """Run code, and return its output.

        Args:
            last: nothing comes after it. What a process has said then counts, however it ends.

        Raises:
            _Failed: it took too long, or ended; InfraError: the sandbox fails.
        """
        code = code if self.generation is not None else f"{_load_modules(self.modules)}{code}"
        if len(code) > PART:
            for at in range(0, len(code), PART):
                await self._run_part(f"_parts = [*globals().get('_parts', []), {code[at : at + PART]!r}]")
            code = "_code, _parts = ''.join(_parts), []\nexec(_code, globals())"
        result = await self._run_part(code, alone=last and self.generation is None)
        if result.status != "ok" and not last:
            raise _Failed(result.status)
        return str(result.output)

    async def ask(self, code: str, *, last: bool = False) -> dict[str, plain_data.Data]:
        """Run code of ours that says one line of JSON."""
        line = (await self.run(code, last=last)).strip().rpartition("\n")[2]
        if not line:
            raise _Failed("it ended")
        said: dict[str, plain_data.Data] = json.loads(line)
        return said

    async def _run_part(self, code: str, *, alone: bool = False) -> CodeResult:
        left_s = self.deadline - _get_time()
        if left_s <= 0:
            raise _Failed("timeout")
        name = None if alone else self.name
        result = await self.sandbox.run(code, session=name, timeout_s=left_s, old=self.generation)
        if result.status == "lost":
            raise InfraError("sandbox_gone", "the sandbox was started again while it judged")
        if not alone:
            self.generation = self.sandbox.generation
        return result


def _get_time() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def _open_session(
    sandbox: ForkServerClient, deadline: float, modules: tuple[str, ...]
) -> AsyncIterator[_JudgedProcess]:
    session = _JudgedProcess(sandbox, deadline, modules)
    try:
        yield session
    finally:
        if session.generation is not None:
            await sandbox.end(session.name)


def _define(code: str, requests: Sequence[plain_data.Data]) -> str:
    asked = ascii(json.dumps(requests))
    return f"_s = submission.Submission()\nif _s.define({code!a}): _s.handle({asked})"


@cache
def _load_modules(names: tuple[str, ...]) -> str:
    """Write the code that makes our modules there: as bytecode, since reading source takes longer than a call."""
    folder = Path(__file__).parent / "inside"
    codes = {n: compile((folder / f"{n}.py").read_text("utf-8"), f"<{n}>", "exec", optimize=2) for n in names}
    packed = base64.b64encode(zlib.compress(marshal.dumps(codes), 9)).decode()
    return (
        "import base64, marshal, sys, types, zlib\n"
        f"_package = sys.modules[{_PACKAGE!r}] = types.ModuleType({_PACKAGE!r})\n"
        f"for _name, _code in marshal.loads(zlib.decompress(base64.b64decode({packed!r}))).items():\n"
        f"    _module = sys.modules[{_PACKAGE!r} + '.' + _name] = types.ModuleType(_name)\n"
        "    exec(_code, _module.__dict__)\n"
        "    setattr(_package, _name, _module)\n"
        "    globals()[_name] = _module\n"
    )


def _read_answers(output: str, number: int) -> list[str | None]:
    """Read the answers' JSON, as text, from lines of number and answer; ``None`` where there is none."""
    answers: list[str | None] = [None] * number
    for line in output.splitlines():
        place, _, text = line.partition(" ")
        if place.isdecimal() and len(place) < 6 and int(place) < number:
            answers[int(place)] = text
    return answers


def _compare_all(answers: Sequence[str | None], expected: Sequence[plain_data.Value]) -> list[bool]:
    return [_is_same(answer, value) for answer, value in zip(answers, expected, strict=True)]


def _is_same(answer: str | None, expected: plain_data.Value) -> bool:
    """Compare an answer, as it came out of the sandbox, with what is expected."""
    right = plain_data.canonicalize(_encode(expected))
    if answer is None or len(answer) > LONGER * len(right) + 100:
        return False
    try:
        return plain_data.canonicalize(json.loads(answer)["v"]) == right
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # it is no answer of ours
        return False


def _encode(value: plain_data.Value) -> plain_data.Data:
    try:
        return plain_data.encode_value(value, _encode_reduced)
    except ValueError as error:
        raise TestsError(f"the tests hold {error}") from None


def _encode_reduced(value: plain_data.Value) -> plain_data.Data:
    reduced = plain_data.reduce(value)
    if reduced is ...:
        raise TestsError(f"a {type(value).__name__} in the tests is no plain value")
    return _encode(reduced)
