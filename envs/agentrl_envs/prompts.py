"""prompts: a dataset with a ``prompt`` column and reward functions as TRL has them. One turn, the same path."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import Any

from anyio import to_thread

from agentrl import ContractError, Env, Reply, RewardModel, Step, Trajectory, UserError, registry
from agentrl.aside import in_thread
from agentrl.errors import nearest
from agentrl.types import Message, Observation
from agentrl_envs import dataset
from agentrl_envs.rewards import REWARDS

Reward = Callable[..., Any]


class Prompts(Env):
    """Single-turn GRPO. A task is a row; its prompt is a string, or a list of messages.

    Args:
        data: a .jsonl or .parquet file, a Hugging Face dataset's name (``name:config``), a ``Dataset``, or rows.
        rewards: functions ``f(prompts, completions, **columns) -> list[float | None]``, sync or async; or names:
            ``accuracy``, ``think_format``, ``soft_overlong_punishment``, ``module:function``, or
            ``reward-model:FOLDER_OR_NAME``, a sequence classifier; or such a model, loaded, or a ``RewardModel``.
        reward_weights: one weight a reward; 1 by default.
        test_data: rows for evaluation. Without it the last tenth of ``data`` (256 rows at most) is held out.
        prompt_column: the name of the column that holds the prompt.
        system_prompt: put before every prompt.
        max_completion_len, soft_punish_cache: what ``soft_overlong_punishment`` measures by, in tokens.
    """

    max_turns = 1

    def __init__(
        self,
        data: Any,
        rewards: Sequence[str | Reward] = ("accuracy",),
        reward_weights: Sequence[float] | None = None,
        test_data: Any = None,
        prompt_column: str = "prompt",
        system_prompt: str = "",
        max_completion_len: int = 512,
        soft_punish_cache: int = 128,
    ) -> None:
        self.prompt_column, self.system_prompt = prompt_column, system_prompt
        self.functions = _functions(rewards)
        if reward_weights is not None and len(reward_weights) != len(self.functions):
            raise ContractError(
                f"env.reward_weights has {len(reward_weights)} weights for {len(self.functions)} rewards"
            )
        self.reward_weights = dict(zip(self.functions, reward_weights or [1.0] * len(self.functions), strict=True))
        if not 0 < soft_punish_cache <= max_completion_len:
            raise ContractError(
                f"env.soft_punish_cache is 1 to env.max_completion_len ({max_completion_len}), not {soft_punish_cache}"
            )
        self.lengths = {"max_completion_len": max_completion_len, "soft_punish_cache": soft_punish_cache}

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[Mapping[str, Sequence[dataset.Row]]]:
        """The rows by split, loaded once a run."""
        if "data" not in settings:
            raise UserError("env 'prompts' needs a dataset: --env.data FILE.jsonl (or data=... in Python)")
        column = settings.get("prompt_column", "prompt")
        for function in _functions(settings.get("rewards", ("accuracy",))).values():
            if isinstance(function, RewardModel):
                await function.load()
        train = await to_thread.run_sync(_rows, settings["data"], "train", column)
        if settings.get("test_data") is not None:
            yield {"train": train, "test": await to_thread.run_sync(_rows, settings["test_data"], "test", column)}
            return
        held = min(256, max(1, len(train) // 10))
        if held >= len(train):
            raise UserError(f"env.data has {len(train)} row; two are the least, one of which is held out")
        yield {"train": _Slice(train, 0, len(train) - held), "test": _Slice(train, len(train) - held, len(train))}

    def count(self, split: str) -> int | None:
        return len(self.shared[split])

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        rows = self.shared[(options or {}).get("split", "train")]
        self.row = dict(rows[seed % len(rows)])
        self.prompt = self.row.pop(self.prompt_column)
        messages: list[Message] = (
            [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt
        )
        if self.system_prompt:
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return messages, {}

    async def step(self, action: Reply) -> Step:
        return Step([], 0.0, True, False, {})

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        chat = not isinstance(self.prompt, str)
        text = trajectory.messages[-1]["content"]
        completion: Any = [{"role": "assistant", "content": text}] if chat else text
        ids = [t for s in trajectory.segments if s.author == "model" for t in s.token_ids]
        columns = {name: [value] for name, value in self.row.items()}
        columns |= {"prompts": [self.prompt], "completions": [completion], "completion_ids": [ids]}
        return {name: await self._call(name, function, columns) for name, function in self.functions.items()}

    async def _call(self, name: str, function: Reward, columns: Mapping[str, Any]) -> float | None:
        given = {**self.lengths, **columns} if function is REWARDS.get(name) else columns
        try:
            inspect.signature(function).bind(**given)
        except TypeError as error:
            names = ", ".join(given)
            raise ContractError(f"reward {name!r}: {error}; it is called with {names} (take **columns too)") from None
        call = partial(function, **given)
        awaited = inspect.iscoroutinefunction(function) or isinstance(function, RewardModel)
        result = await call() if awaited else await in_thread(call)
        result = await result if inspect.isawaitable(result) else result
        result = result.tolist() if hasattr(result, "tolist") else result  # an array
        if not isinstance(result, list | tuple) or len(result) != 1:
            raise ContractError(
                f"reward {name!r} returned {result!r:.80} for 1 completion; it must return a list of 1 number"
            )
        value: float | None = result[0]
        return value


class _Slice(Sequence[dataset.Row]):
    """Part of a sequence of rows, without copying it."""

    def __init__(self, rows: Sequence[dataset.Row], start: int, stop: int) -> None:
        self._rows, self._range = rows, range(start, stop)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[self._range[index]]


def _rows(data: Any, split: str, column: str) -> Sequence[dataset.Row]:
    rows = dataset.load(data, split)
    if not len(rows):
        raise UserError(f"dataset {data!r:.80} has no rows")
    if not isinstance(rows[0], Mapping):
        raise UserError(f"dataset {data!r:.80}: a row is a dict with a {column!r}, not {rows[0]!r:.80}")
    if column not in rows[0]:
        raise UserError(
            f"dataset {data!r:.80} has no column {column!r}{nearest(column, rows[0])} (--env.prompt_column NAME)"
        )
    for number in range(len(rows)) if isinstance(rows, list) else (0,):
        _check_prompt(rows[number].get(column), number, column)
    return rows


def _check_prompt(prompt: Any, number: int, column: str) -> None:
    if isinstance(prompt, str):
        return
    messages = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    if not (messages and prompt):
        raise UserError(f"row {number + 1}: {column!r} must be a string or a list of messages, not {prompt!r:.80}")


def _functions(rewards: Sequence[str | Reward]) -> dict[str, Reward]:
    found: dict[str, Reward] = {}
    for reward in rewards:
        function = _function(reward)
        if not callable(function):
            raise ContractError(f"reward {reward!r} is {function!r:.60}, not a function")
        name = getattr(function, "__name__", type(function).__name__)
        if name in found:
            raise ContractError(f"two rewards are called {name!r}")
        found[name] = function
    if not found:
        raise UserError("env.rewards is empty; name at least one, such as accuracy")
    return found


def _function(reward: Any) -> Any:
    if hasattr(reward, "config") and hasattr(reward, "get_input_embeddings"):
        return _reward_model(reward)
    if not isinstance(reward, str):
        return reward
    kind, _, name = reward.partition(":")
    if kind == "reward-model":
        return _reward_model(name)
    if not name and reward not in REWARDS:
        raise UserError(f"no reward {reward!r}{nearest(reward, REWARDS)} (or say module:function, reward-model:NAME)")
    return REWARDS.get(reward) or registry.imported(f"reward {reward!r}", reward)


@lru_cache(maxsize=8)
def _reward_model(model: Any) -> RewardModel:
    """One for all episodes of a run: they are made anew each, with the same settings."""
    return RewardModel(model)
