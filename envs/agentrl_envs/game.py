"""game: many turns and no tools. The model moves, the world answers, and what is hidden stays hidden."""

from __future__ import annotations

import copy
import math
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any, Literal

from agentrl import ContractError, Env, Message, Reply, Step, Trajectory
from agentrl.environments.task_sampler import task_index
from agentrl.runtime.threads import run_in_thread
from agentrl.types import ExpertTurn, Observation, strip_thoughts
from agentrl_envs.rewards import extract_boxed
from agentrl_envs.splits import Split, assign_split

Kind = Literal["guess", "code"]
CODES = tuple("".join(code) for code in product("123456", repeat=4))
CODE_TURNS = 6  # who guesses well needs no more
MOST_NUMBERS = 1_000_000
NEAR = 8  # the expert's guesses are within an eighth of the range from its middle
HIGHEST = 9999  # that the numbers may begin at
_RULES = {
    "guess": "Guess my number from {low} to {high}. I say higher or lower. You have {turns} turns. Say \\boxed{{N}}.",
    "code": "Guess my code: 4 digits from 1 to 6. I say how many are in the right place, and how many more are "
    "elsewhere. You have {turns} turns. Say \\boxed{{N}}.",
}


class Game(Env):
    r"""Find what is hidden, a guess a turn: ``\boxed{N}``.

    Args:
        kind: ``guess``, a number by higher and lower; or ``code``, four digits by how many are right (Mastermind).
        numbers: how many ``guess`` has to choose from; there are as many turns as halving needs.
        step_rewards: whether each guess is told, as a step reward, which share of what was not known it has found out.
    """

    named_by = "kind"

    def __init__(self, kind: Kind = "guess", numbers: int = 1000, step_rewards: bool = False) -> None:
        if not 2 <= numbers <= MOST_NUMBERS:
            raise ContractError(f"env 'game': numbers is 2 to {MOST_NUMBERS}, not {numbers}")
        self.kind, self.numbers, self.step_rewards = kind, numbers, step_rewards
        self.max_turns = CODE_TURNS if kind == "code" else math.floor(math.log2(numbers)) + 1

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        split = (options or {}).get("split", "train")
        rng = random.Random(f"game/{self.kind}/{self.numbers}/{task_index(seed)}/{split}")
        self.turn, self.found = 0, False
        self.possible: Sequence[Any]  # what the answers so far have left
        if self.kind == "code":
            self.hidden, self.possible = _drawn(rng, split, CODES), CODES
            return _RULES["code"].format(turns=self.max_turns), {"kind": "code"}
        self.low = int(_drawn(rng, split, range(1, HIGHEST + 1)))
        self.high = self.low + self.numbers - 1
        self.hidden, self.possible = str(rng.randint(self.low, self.high)), range(self.low, self.high + 1)
        return _RULES["guess"].format(low=self.low, high=self.high, turns=self.max_turns), {"kind": "guess"}

    async def step(self, action: Reply) -> Step:
        self.turn += 1
        guess = extract_boxed(strip_thoughts(action.content))
        before = len(self.possible)
        told = self._answer(guess or "")
        share = math.log(before / len(self.possible)) / math.log(len(CODES) if self.kind == "code" else self.numbers)
        left = self.max_turns - self.turn
        over = not self.found and left <= 0
        if not self.found and not over:
            told += f" {left} turn{'s' * (left > 1)} left."
        info = {"expected": self.hidden} if self.found or over else {}  # no sooner: who plays may read info
        return Step(told, share if self.step_rewards else 0.0, self.found, over, info)

    def _answer(self, guess: str) -> str:
        """Answer a guess, and narrow down the possible numbers."""
        number = guess.replace(",", "") if self.kind == "guess" else guess.replace(" ", "")
        if not re.fullmatch(r"[0-9]{1,9}", number):
            return "Say one number in \\boxed{}."
        return self._to_code(number) if self.kind == "code" else self._to_number(int(number))

    def _to_number(self, guess: int) -> str:
        if not self.low <= guess <= self.high:
            return f"It is from {self.low} to {self.high}."
        hidden, possible = int(self.hidden), self.possible
        self.found = guess == hidden
        if self.found:
            self.possible = range(guess, guess + 1)
            return "Right."
        if guess < hidden:
            self.possible = range(max(possible[0], guess + 1), possible[-1] + 1)
            return "Higher."
        self.possible = range(possible[0], min(possible[-1], guess - 1) + 1)
        return "Lower."

    def _to_code(self, guess: str) -> str:
        if guess not in CODES:
            return "A code has 4 digits from 1 to 6."
        there, elsewhere = told = _count_matches(guess, self.hidden)
        self.found = guess == self.hidden
        if self.step_rewards:  # nobody else asks
            self.possible = tuple(code for code in self.possible if _count_matches(guess, code) == told)
        return "Right." if self.found else f"{there} in place, {elsewhere} elsewhere."

    async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
        """Guess near the middle of what is left; of the guesses after which the turns are enough, draw one."""
        rng = random.Random(f"{self.hidden}/{self.numbers}")
        if self.kind == "code":
            left = CODES
            while True:
                guess = await run_in_thread(partial(_split_codes, left))
                told = yield f"\\boxed{{{guess}}}"
                there, elsewhere = map(int, re.findall("[0-9]+", told[-1]["content"])[:2])
                left = tuple(code for code in left if _count_matches(guess, code) == (there, elsewhere))
        low, high = self.low, self.high
        for turns in range(self.max_turns - 1, -1, -1):  # that are left after a guess
            most = 2**turns - 1  # numbers that they tell apart
            middle, near = (low + high) // 2, (high - low) // NEAR
            number = rng.randint(max(low, high - most, middle - near), min(high, low + most, middle + near))
            told = yield f"\\boxed{{{number}}}"
            low, high = (number + 1, high) if told[-1]["content"].startswith("Higher") else (low, number - 1)

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"found": float(self.found)}

    def clone(self) -> Game:
        """Copy the game; nothing that it holds is ever changed in place."""
        return copy.copy(self)


@lru_cache(maxsize=512)  # the second guess depends on the first answer alone
def _split_codes(left: tuple[str, ...]) -> str:
    """Return the code of those that are left whose answer leaves the fewest at worst; of many, a sample is tried."""
    if len(left) == len(CODES):
        return "1123"
    tried = random.Random(left[0]).sample(left, min(len(left), 60))
    return min(tried, key=lambda guess: max(Counter(_count_matches(guess, code) for code in left).values()))


def _count_matches(guess: str, code: str) -> tuple[int, int]:
    """Count the digits in the right place, and those that are somewhere else."""
    there = sum(a == b for a, b in zip(guess, code, strict=True))
    return there, (Counter(guess) & Counter(code)).total() - there


def _drawn(rng: random.Random, split: Split, choices: Any) -> str:
    while True:
        drawn = str(rng.choice(choices))
        if assign_split(drawn) == split:
            return drawn
