"""Questions about the cost of a basket. The prices are hidden: they must be looked up. A seed is a task."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.environments.task_sampler import task_index
from agentrl_envs.splits import Split, assign_split

SYSTEM_PROMPT = "Answer with \\boxed{}."

ITEMS = (
    "apple", "bag", "ball", "bed", "bike", "book", "bowl", "cake", "card", "chair", "clock", "coat",
    "cup", "desk", "door", "drum", "hat", "kite", "lamp", "map", "pan", "pear", "pen", "plate",
    "ring", "rope", "rug", "shirt", "shoe", "sofa", "tent", "vase",
)  # fmt: skip

_ASK = (
    "What do {} cost?",
    "How much are {}?",
    "What is the price of {}?",
    "Find the total for {}.",
    "{name} buys {}. What is the bill?",
)
_NAMES = ("Mia", "Tom", "Ada", "Leo", "Eva", "Sam", "Ida", "Max")


@dataclass(frozen=True)
class _ShopTask:
    question: str
    answer: int
    basket: Mapping[str, int]  # item -> how many
    prices: Mapping[str, int]  # every item of the shop -> its price today
    expression: str

    def price(self, item: str) -> int | None:
        """Return the price of an item, singular or plural; None if the shop does not sell it."""
        name = item.strip().lower()
        return self.prices.get(name, self.prices.get(name.removesuffix("s")))


def draw(seed: int, *, split: Split) -> _ShopTask:
    rng = random.Random(f"shop/{task_index(seed)}/{split}")
    while True:
        names = rng.sample(ITEMS, rng.randint(1, 3))
        basket = {name: rng.randint(2, 20) for name in names}
        if assign_split(",".join(sorted(f"{count} {name}" for name, count in basket.items()))) == split:
            break
    prices = {name: rng.randint(2, 10 ** rng.randint(1, 3) - 1) for name in ITEMS}
    return _ShopTask(
        question=rng.choice(_ASK).format(_listed(basket), name=rng.choice(_NAMES)),
        answer=sum(count * prices[name] for name, count in basket.items()),
        basket=basket,
        prices=prices,
        expression="+".join(f"{count}*{prices[name]}" for name, count in basket.items()),
    )


def _listed(basket: Mapping[str, int]) -> str:
    *others, last = [f"{count} {name}s" for name, count in basket.items()]
    return f"{', '.join(others)} and {last}" if others else last
