"""Policies that have learnt nothing, and the engine that plays them. No torch."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from agentrl.checks.argument_fuzzing import draw_arguments, draw_wrong_arguments, extract_words
from agentrl.testing import ROLES, STOP, ScriptedEngine, call, decode_text
from agentrl.types import Completion, JsonSchema, SamplingParams


@dataclass(frozen=True)
class _TurnView:
    """The input of a policy: the first question, the tools, the number of the turn, and a random generator."""

    question: str
    tools: Sequence[JsonSchema]
    turn: int
    rng: random.Random

    @property
    def words(self) -> list[str]:
        """List the words, the numbers and the quoted texts of the question."""
        return extract_words(self.question)


Policy = Callable[[_TurnView], str]


class PolicyEngine(ScriptedEngine):
    """An engine that plays a policy. The generator of a turn has the seed that the rollout gives."""

    def __init__(self, policy: Policy, tools: Sequence[JsonSchema]) -> None:
        super().__init__(lambda session, _: self._next.pop(session))
        self.policy, self.tools = policy, tools
        self._next: dict[str, str] = {}

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        turn = _TurnView(_question(token_ids), self.tools, self.turns[session], random.Random(params.seed))
        self._next[session] = self.policy(turn)
        self.contexts.clear()  # nobody reads them
        return await super().generate(token_ids, params, session=session)


def _question(token_ids: Sequence[int]) -> str:
    """Return the text of the first user turn of the byte renderer."""
    if ROLES["user"] not in token_ids:
        return ""
    start = list(token_ids).index(ROLES["user"])
    return decode_text(token_ids[start : list(token_ids).index(STOP, start)])


def say_nothing(_: _TurnView) -> str:
    """Say nothing."""
    return ""


def _say_noise(view: _TurnView) -> str:
    """Say random characters, and sometimes a number in a box."""
    text = "".join(chr(view.rng.randint(32, 0x2FF)) for _ in range(view.rng.randint(1, 60)))
    return text + rf" \boxed{{{view.rng.randint(-9, 99)}}}" if view.rng.random() < 0.5 else text


def call_at_random(view: _TurnView) -> str:
    """Make calls whose arguments conform to the schemas, for three turns; then say a number."""
    if not view.tools or view.turn > 2:
        return rf"\boxed{{{view.rng.randint(0, 99)}}}"
    return "".join(_format_random_call(view) for _ in range(view.rng.randint(1, 3)))


def _format_random_call(view: _TurnView) -> str:
    function = view.rng.choice(view.tools)["function"]
    return call(function["name"], **draw_arguments(function["parameters"], view.rng, view.words))


def _echo_question(view: _TurnView) -> str:
    """Repeat the question, also in a box."""
    return rf"{view.question} \boxed{{{view.question}}}"


def _list_numbers(view: _TurnView) -> str:
    """Say every number of the question, and those up to a hundred, each in a box."""
    numbers = [*map(str, range(101)), *re.findall(r"\d+(?:\.\d+)?", view.question)]
    return " ".join(rf"\boxed{{{n}}}" for n in numbers)


UNTRAINED_POLICIES: dict[str, Policy] = {
    "an empty answer": say_nothing,
    "random text": _say_noise,
    "random tool calls": call_at_random,
    "the question, repeated": _echo_question,
    "every number of the question in a box": _list_numbers,
}


def generate_garbage(tools: Sequence[JsonSchema]) -> Iterator[str]:
    """Yield turns as a model at its worst writes them: odd texts, unreadable calls, impossible calls."""
    yield from ("", " \n", "\x00\x1b[2J\u202e", "x" * 20_000, "<think>", "</think>", "<think></think>" * 50)
    yield from (r"\boxed{", r"\boxed" * 200, r"\boxed{" * 200)
    for inside in ("", "nan", "1/0", "None", "9" * 5000, "9^{9^{9^9}}", "1e999999", "\u00bd", "[1, 2]"):
        yield rf"\boxed{{{inside}}}"
    for inside in (
        "",
        "{",
        "[]",
        "null",
        '"x"',
        "{}",
        '{"name": 3}',
        '{"name": "x", "arguments": [1]}',
        '{"name": "x"',
    ):
        yield f"<tool_call>{inside}</tool_call>"
    yield "<tool_call>"
    yield call("no_such_tool", a=1)
    yield "<tool_call>" + "[" * 3000
    for tool in tools:
        function = tool["function"]
        for arguments in draw_wrong_arguments(function["parameters"], random.Random(0)):
            yield call(function["name"], **arguments)


def say_once(text: str) -> Policy:
    """Say this, then nothing more."""
    return lambda view: text if view.turn == 0 else ""
