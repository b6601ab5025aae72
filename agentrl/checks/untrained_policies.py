"""Policies that have learnt nothing: what they say, and the engine that says it. No torch."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from agentrl.inspection.arguments import conforming, words_of, wrong
from agentrl.testing import ROLES, STOP, ScriptedEngine, call, text_of
from agentrl.types import Completion, JsonSchema, SamplingParams


@dataclass(frozen=True)
class Seen:
    """What a policy goes by: the first question, the tools, the number of the turn, and dice."""

    question: str
    tools: Sequence[JsonSchema]
    turn: int
    rng: random.Random

    @property
    def words(self) -> list[str]:
        """What the question is made of: words, numbers, and what stands in quotation marks."""
        return words_of(self.question)


Policy = Callable[[Seen], str]


class Player(ScriptedEngine):
    """An engine that plays a policy. The dice of a turn are those that the rollout seeds."""

    def __init__(self, policy: Policy, tools: Sequence[JsonSchema]) -> None:
        super().__init__(lambda session, _: self._next.pop(session))
        self.policy, self.tools = policy, tools
        self._next: dict[str, str] = {}

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        seen = Seen(_question(token_ids), self.tools, self.turns[session], random.Random(params.seed))
        self._next[session] = self.policy(seen)
        self.contexts.clear()  # nobody reads them
        return await super().generate(token_ids, params, session=session)


def _question(token_ids: Sequence[int]) -> str:
    """What the first user turn of the byte renderer says."""
    if ROLES["user"] not in token_ids:
        return ""
    start = list(token_ids).index(ROLES["user"])
    return text_of(token_ids[start : list(token_ids).index(STOP, start)])


def nothing(_: Seen) -> str:
    """An empty answer."""
    return ""


def noise(seen: Seen) -> str:
    """Random characters, and sometimes a number in a box."""
    text = "".join(chr(seen.rng.randint(32, 0x2FF)) for _ in range(seen.rng.randint(1, 60)))
    return text + rf" \boxed{{{seen.rng.randint(-9, 99)}}}" if seen.rng.random() < 0.5 else text


def calls(seen: Seen) -> str:
    """Calls whose arguments conform to the schemas, for three turns; then a number."""
    if not seen.tools or seen.turn > 2:
        return rf"\boxed{{{seen.rng.randint(0, 99)}}}"
    return "".join(random_call(seen) for _ in range(seen.rng.randint(1, 3)))


def random_call(seen: Seen) -> str:
    function = seen.rng.choice(seen.tools)["function"]
    return call(function["name"], **conforming(function["parameters"], seen.rng, seen.words))


def echo(seen: Seen) -> str:
    """The question itself, and in a box."""
    return rf"{seen.question} \boxed{{{seen.question}}}"


def numbers(seen: Seen) -> str:
    """Every number of the question, and those up to a hundred, each in a box."""
    found = [*map(str, range(101)), *re.findall(r"\d+(?:\.\d+)?", seen.question)]
    return " ".join(rf"\boxed{{{n}}}" for n in found)


IDLE: dict[str, Policy] = {
    "an empty answer": nothing,
    "random text": noise,
    "random tool calls": calls,
    "the question, repeated": echo,
    "every number of the question in a box": numbers,
}


def garbage(tools: Sequence[JsonSchema]) -> Iterator[str]:
    """Turns as a model at its worst writes them: odd texts, calls that cannot be read, calls that cannot be made."""
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
        for arguments in wrong(function["parameters"], random.Random(0)):
            yield call(function["name"], **arguments)


def first(text: str) -> Policy:
    """Say this, then nothing more."""
    return lambda seen: text if seen.turn == 0 else ""
