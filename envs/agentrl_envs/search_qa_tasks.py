"""A made-up world of people, towns, companies and rivers, and questions that lead from one to the next.

The world has two halves, ``train`` and ``test``, that know nothing of each other: no name is in both, so that nothing
learned by heart in one answers a question of the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from agentrl_tools.passages import Passage

from agentrl.environments.task_sampler import task_index
from agentrl_envs.splits import Split

SYSTEM_PROMPT = "Look it up step by step. Answer with \\boxed{}."
HOPS = (1, 2, 3)

# how many of each kind a half of a world of size 1 has
MAX_SIZE = 20  # of a world: there are names for no more
SIZES = {"country": 60, "town": 200, "person": 400, "company": 200, "river": 120, "book": 200}

# kind -> its facts: (name, kind of what it names; "" for a number)
FACTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "country": (("capital", "town"), ("year", "")),
    "town": (("country", "country"), ("mayor", "person"), ("river", "river")),
    "person": (("birthplace", "town"), ("year", "")),
    "company": (("founder", "person"), ("seat", "town")),
    "river": (("source", "country"), ("length", "")),
    "book": (("author", "person"), ("publisher", "company")),
}
_PAGES = {
    "country": "{name} is a country, founded in {year}. Its capital is {capital}.",
    "town": "{name} is a town in {country}, on the river {river}. Its mayor is {mayor}.",
    "person": "{name} was born in {birthplace} in {year}.",
    "company": "{name} is a company in {seat}, founded by {founder}.",
    "river": "The {name} is a river of {length} km that rises in {source}.",
    "book": "{name} is a book by {author}, published by {publisher}.",
}
# (kind, fact) -> how a longer question names it, and how a question asks for it
_ASK = {
    ("country", "capital"): ("the capital of {}", "What is the capital of {}?"),
    ("country", "year"): ("", "When was {} founded?"),
    ("town", "country"): ("the country of {}", "In which country is {}?"),
    ("town", "mayor"): ("the mayor of {}", "Who is the mayor of {}?"),
    ("town", "river"): ("the river of {}", "Which river is {} on?"),
    ("person", "birthplace"): ("the birthplace of {}", "Where was {} born?"),
    ("person", "year"): ("", "When was {} born?"),
    ("company", "founder"): ("the founder of {}", "Who founded {}?"),
    ("company", "seat"): ("the seat of {}", "In which town is {}?"),
    ("river", "source"): ("the country where {} rises", "In which country does {} rise?"),
    ("river", "length"): ("", "How long is {}, in km?"),
    ("book", "author"): ("the author of {}", "Who wrote {}?"),
    ("book", "publisher"): ("the publisher of {}", "Who published {}?"),
}
_SYLLABLES = (
    *("ba", "be", "do", "du", "fa", "fi", "ga", "go", "ha", "hu", "ka", "ke", "la", "le", "lo", "ma", "mi", "mo", "na"),
    *("ne", "no", "pa", "pi", "ra", "re", "ri", "ro", "sa", "so", "su", "ta", "te", "to", "va", "ve", "vo", "za", "zu"),
)
_ENDINGS = {"country": "land", "town": "burg", "person": "", "company": "corp", "river": "m", "book": "x"}


@dataclass(frozen=True)
class _Thing:
    name: str
    kind: str
    facts: Mapping[str, str]

    @property
    def page(self) -> Passage:
        return Passage(self.name, self.name, _PAGES[self.kind].format(name=self.name, **self.facts))


@dataclass(frozen=True)
class _SearchTask:
    questions: tuple[str, ...]  # as they stand once so many pages of the path are read
    answer: str
    path: tuple[str, ...]  # the pages that lead to the answer, in order

    @property
    def question(self) -> str:
        """Return the question as it is asked."""
        return self.questions[0]


@dataclass(frozen=True)
class SearchWorld:
    """The passages of a world, made anew whenever they are asked for."""

    seed: int = 0
    size: int = 1

    def __iter__(self) -> Iterator[Passage]:
        """Yield the passages in an order that reveals no relations."""
        pages = [
            thing.page for split in ("train", "test") for thing in _build_half(self.seed, split, self.size).values()
        ]
        random.Random(f"search-qa/{self.seed}/order").shuffle(pages)
        yield from pages


@lru_cache(maxsize=8)
def _build_half(seed: int, split: Split, size: int = 1) -> dict[str, _Thing]:
    """Build the things of one half of a world, by name."""
    names = _names(seed, split, size)
    rng = random.Random(f"search-qa/{seed}/{split}")
    numbers = {"year": (1500, 2020), "length": (100, 3000)}
    found = {}
    for kind, ours in names.items():
        for name in ours:
            facts = {
                fact: rng.choice(names[other]) if other else str(rng.randint(*numbers[fact]))
                for fact, other in FACTS[kind]
            }
            found[name] = _Thing(name, kind, facts)
    for country, capital in zip(names["country"], rng.sample(names["town"], len(names["country"])), strict=True):
        found[country] = replace(found[country], facts={**found[country].facts, "capital": capital})
        found[capital] = replace(found[capital], facts={**found[capital].facts, "country": country})
    return found


def _names(seed: int, split: Split, size: int) -> dict[str, list[str]]:
    """Draw the names of both halves together, each once, then divide them."""
    rng = random.Random(f"search-qa/{seed}/names")
    count = 2 * size * sum(SIZES.values())
    stems = rng.sample([a + b + c for a in _SYLLABLES for b in _SYLLABLES for c in _SYLLABLES], count)
    ours = iter(stems[: count // 2] if split == "train" else stems[count // 2 :])
    return {kind: [(next(ours) + _ENDINGS[kind]).capitalize() for _ in range(size * n)] for kind, n in SIZES.items()}


def draw(seed: int, *, split: Split, hops: Sequence[int] = HOPS, world: int = 0, size: int = 1) -> _SearchTask:
    """Draw task ``seed``. Raises ValueError for an unknown number of hops."""
    if not hops or any(n not in HOPS for n in hops):
        raise ValueError(f"hops are some of {', '.join(map(str, HOPS))}; not {list(hops)}")
    things = _build_half(world, split, size)
    rng = random.Random(f"search-qa/{world}/{task_index(seed)}/{split}/{hops}")
    names = list(things)
    while True:
        if (task := _walk(rng, things, rng.choice(names), rng.choice(list(hops)))) is not None:
            return task


def _walk(rng: random.Random, things: Mapping[str, _Thing], start: str, hops: int) -> _SearchTask | None:
    """Draw a question of so many facts, each about the thing that the last one named; None if it comes back."""
    path, facts = [start], list[str]()
    for hop in range(1, hops + 1):
        thing = things[path[-1]]
        fact = rng.choice([fact for fact, named in FACTS[thing.kind] if named or hop == hops])
        value = thing.facts[fact]
        facts.append(fact)
        if hop == hops:
            told = " ".join(things[name].page.text for name in path[:-1])
            if value in path or value in told:
                return None  # the answer stands on a page before the last
            questions = [_ask(things, path[at:], facts[at:]) for at in range(hops)]
            return _SearchTask(tuple(questions), value, tuple(path))
        if value in path:
            return None
        path.append(value)
    return None


def _ask(things: Mapping[str, _Thing], path: Sequence[str], facts: Sequence[str]) -> str:
    """Ask for the last fact of the last page, by way of the ones before it."""
    phrase = path[0]
    for name, fact in zip(path[:-1], facts[:-1], strict=True):
        phrase = _ASK[things[name].kind, fact][0].format(phrase)
    return _ASK[things[path[-1]].kind, facts[-1]][1].format(phrase)
