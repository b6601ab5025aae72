"""reasoning-gym: the procedural tasks of the package of that name, one environment each."""

from __future__ import annotations

import math
import random
import re
import warnings
from ast import literal_eval
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

from agentrl import ContractError, Env, Reply, Step, Trajectory
from agentrl.environments.task_sampler import task_index
from agentrl.errors import InfraError, NoExpertError, suggest
from agentrl.runtime.processes import WorkerDied, call_in_process
from agentrl.types import ExpertTurn, Message, Observation
from agentrl_envs.rewards import extract_boxed
from agentrl_envs.splits import Split, assign_split

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TRIES = 1000  # one task in eight is a test task
_SCORE_CPU_S = 10.0
_SCORE_WALL_S = 120.0  # of a scorer that waits for a processor
_SCORE_BYTES = 1 << 30

Entry = dict[str, Any]  # question, answer, metadata


class ReasoningGym(Env):
    r"""A task of reasoning-gym: ``--env reasoning-gym:chain_sum``. The answer goes in ``<answer>``, or in ``\boxed{}``.

    Args:
        name: of the 106 tasks.
        config: the task's own options: ``--env.config.max_terms 4``, or a table in a file.
        system_prompt: how to answer.
    """

    named_by = "name"
    needs = {"reasoning_gym": "reasoning-gym"}
    max_turns = 1

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any] | None = None,
        system_prompt: str = "Put the answer, and nothing else, between <answer> and </answer>.",
    ) -> None:
        self.name, self.config, self.system_prompt = name, dict(config or {}), system_prompt

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[None]:
        """Check that there is such a task, with such options."""
        await call_in_process(check_task, settings["name"], dict(settings.get("config") or {}))
        yield

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        split = (options or {}).get("split", "train")
        # In a process of its own: some tasks take a second to make, and some use the global random module.
        self.entry = await call_in_process(draw, self.name, repr(self.config), seed, split)
        system: list[Message] = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": self.entry["question"]}], {"expected": self.entry["answer"]}

    async def step(self, action: Reply) -> Step:
        return Step([], 0.0, True, False, {})

    async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
        """Say the right answer in its form; how to find it nobody tells."""
        if self.entry["answer"] is None:
            raise NoExpertError(f"reasoning-gym:{self.name} names no answer to this task, so it has no expert")
        yield f"<answer>{self.entry['answer']}</answer>"

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        answer, score = extract_answer(trajectory.answer), 0.0
        if answer is not None:  # some scorers pay for no answer, or for any
            try:
                score = await call_in_process(
                    score_answer,
                    *(self.name, repr(self.config), answer, self.entry),
                    timeout_s=_SCORE_WALL_S,
                    cpu_s=_SCORE_CPU_S,
                    memory_bytes=_SCORE_BYTES,
                    reads_others=True,
                )
            except WorkerDied:  # some calculate what the model wrote, such as 9**9**9**9
                score = 0.0
            except TimeoutError:
                raise InfraError("score_timeout", f"the answer was not scored within {_SCORE_WALL_S:g} s") from None
        return {"correct": score}


def extract_answer(text: str) -> str | None:
    r"""Extract the text between the last ``<answer>`` tags, or else in the last ``\boxed{}``."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else extract_boxed(text)


def check_task(name: str, config: dict[str, Any]) -> None:
    """Raise ContractError if there is no such task, or it takes no such options."""
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ContractError(f"reasoning-gym has no task {name!r}{suggest(name, DATASETS)}")
    known = set(DATASETS[name][1].__dataclass_fields__) - {"seed", "size"}  # the seed is the task's
    for option in config:
        if option not in known:
            raise ContractError(f"env.config of reasoning-gym:{name}: no option {option!r}{suggest(option, known)}")
    try:
        _dataset(name, config, 0)
    except Exception as error:  # they check their options by assert
        what = f"{type(error).__name__}: {error}"
        raise ContractError(f"env.config of reasoning-gym:{name}, {config}: {what}") from None


@lru_cache(maxsize=256)  # the members of a group draw the same
def draw(name: str, config: str, seed: int, split: Split) -> Entry:
    """Draw task ``seed`` of a split. The question's text decides the split that it is in, whatever the seed.

    Raises:
        ContractError: there seems to be no task in that split.
    """
    rng = random.Random(f"reasoning-gym/{name}/{config}/{task_index(seed)}/{split}")
    options = literal_eval(config)
    for _ in range(_TRIES):
        number = rng.randrange(2**31)
        random.seed(number)  # codeio and list_functions draw from the global rng
        entry: Entry = _dataset(name, options, number)[0]
        if assign_split(entry["question"]) == split:
            return entry
    raise ContractError(f"reasoning-gym:{name} with {options} has no task in the split {split!r}: it has too few tasks")


def score_answer(name: str, config: str, answer: str, entry: Entry) -> float:
    """Score an answer, 0 to 1. A scorer that cannot read the answer finds it wrong."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            score = float(_scorer(name, config).score_answer(answer, entry))
    except Exception:  # whatever the model's text made it raise
        return 0.0
    return score if math.isfinite(score) else 0.0


@lru_cache(maxsize=8)
def _scorer(name: str, config: str) -> Any:
    return _dataset(name, literal_eval(config), 0)


def _dataset(name: str, options: dict[str, Any], seed: int) -> Any:
    from reasoning_gym import create_dataset

    if name == "composite" and options.get("datasets"):
        from reasoning_gym.composite import DatasetSpec

        options = {**options, "datasets": [DatasetSpec(**d) for d in options["datasets"]]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return create_dataset(name, **options, seed=seed, size=1)
