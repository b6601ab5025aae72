"""prompts: a dataset with a ``prompt`` column and reward functions as TRL has them; with ``--tools`` several turns."""

from __future__ import annotations

import copy
import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, Self

from anyio import to_thread

from agentrl import ContractError, Reply, Step, ToolEnv, Trajectory, UserError
from agentrl.errors import suggest
from agentrl.rewards.functions import Reward, call_rewards, is_per_episode, resolve_rewards
from agentrl.rewards.reward_log import RewardLog
from agentrl.runs.episode_info import find_expected_answer
from agentrl.types import THOUGHT_MARKS, Message, Observation, get_final_text
from agentrl_envs import dataset
from agentrl_envs.rewards import apply_gate, soft_overlong_punishment


class Prompts(ToolEnv):
    """GRPO on a dataset. A task is a row; its prompt is a string, or a list of messages.

    Without tools an episode is one turn. With tools (``--tools calculator,my_tools.py:add``) it ends with the first
    turn that calls none, after ``rollout.max_turns`` turns (8) at the latest.

    Args:
        data: a .jsonl or .parquet file, a Hugging Face dataset's name (``name:config``), a ``Dataset``, or rows.
        rewards: functions ``f(prompts, completions, **columns) -> list[float | None]``, sync or async, called once a
            group, or once an episode where marked `agentrl.rewards.per_episode`; or names:
            those of docs/rewards.md, ``module:function``, or ``reward-model:FOLDER_OR_NAME``, a sequence classifier; or
            such a model, loaded, or a ``RewardModel``.
        reward_weights: one weight a reward; 1 by default.
        reward_settings: of rewards that take some, by name: ``--env.reward_settings.regex.pattern X``.
        gate, gate_at_least: a reward that must be as good as that for the others to count: see docs/rewards.md.
        test_data: rows for evaluation. Without it the last tenth of ``data`` (256 rows at most) is held out,
            all copies of a prompt on one side.
        prompt_column: the name of the column that holds the prompt.
        system_prompt: put before every prompt.
        thought_marks: what opens a thought and what ends it, for the rewards that look past it.
        max_completion_len, soft_punish_cache: what ``soft_overlong_punishment`` measures by, in tokens.
    """

    @property
    def max_turns(self) -> int:  # type: ignore[override]
        """Return 1 where there are no tools."""
        return ToolEnv.max_turns if self.has_tools else 1

    def __init__(
        self,
        data: Any,
        rewards: Sequence[str | Reward] = ("accuracy",),
        reward_weights: Sequence[float] | None = None,
        reward_settings: Mapping[str, Mapping[str, Any]] | None = None,
        gate: str | None = None,
        gate_at_least: float = 1.0,
        test_data: Any = None,
        prompt_column: str = "prompt",
        system_prompt: str = "",
        max_completion_len: int = 512,
        soft_punish_cache: int = 128,
        thought_marks: Sequence[str] = THOUGHT_MARKS,
    ) -> None:
        self.prompt_column, self.system_prompt = prompt_column, system_prompt
        self.functions = resolve_rewards(rewards, reward_settings)
        self.own = {name: f for name, f in self.functions.items() if is_per_episode(f)}
        self.compared = {name: f for name, f in self.functions.items() if name not in self.own}
        self.scores_groups = bool(self.compared)
        if gate is not None and gate not in self.functions:
            raise ContractError(f"env.gate {gate!r} is none of the rewards{suggest(gate, self.functions)}")
        self.gate, self.gate_at_least = gate, gate_at_least
        if reward_weights is not None and len(reward_weights) != len(self.functions):
            raise ContractError(
                f"env.reward_weights has {len(reward_weights)} weights for {len(self.functions)} rewards"
            )
        self.reward_weights = dict(zip(self.functions, reward_weights or [1.0] * len(self.functions), strict=True))
        if not 0 < soft_punish_cache <= max_completion_len:
            raise ContractError(
                f"env.soft_punish_cache is 1 to env.max_completion_len ({max_completion_len}), not {soft_punish_cache}"
            )
        if len(thought_marks) != 2 or not all(thought_marks) or len(set(thought_marks)) == 1:
            raise ContractError(
                f"env.thought_marks is two different texts, such as <think>,</think>; not {thought_marks!r}"
            )
        self.thought_marks = (thought_marks[0], thought_marks[1])
        self.lengths = {"max_completion_len": max_completion_len, "soft_punish_cache": soft_punish_cache}

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[Mapping[str, Sequence[dataset.Row]]]:
        """Load the rows by split, once a run."""
        if "data" not in settings:
            raise UserError("env 'prompts' needs a dataset: --env.data FILE.jsonl (or data=... in Python)")
        column = settings.get("prompt_column", "prompt")
        used = resolve_rewards(settings.get("rewards", ("accuracy",)), settings.get("reward_settings")).values()
        async with AsyncExitStack() as held:
            for function in used:
                if hasattr(function, "close"):
                    held.push_async_callback(function.close)
                if hasattr(function, "load"):  # what cannot be had is told before the first episode
                    await function.load()
            yield await cls._load(settings, column)

    @classmethod
    async def _load(cls, settings: Mapping[str, Any], column: str) -> Mapping[str, Sequence[dataset.Row]]:
        train = await to_thread.run_sync(_rows, settings["data"], "train", column)
        if settings.get("test_data") is not None:
            return {"train": train, "test": await to_thread.run_sync(_rows, settings["test_data"], "test", column)}
        if len(train) < 2:
            raise UserError(f"env.data has {len(train)} row; two are the least, one of which is held out")
        return await to_thread.run_sync(hold_out_rows, train, column)

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
        self.prompt_messages = len(messages)
        right = find_expected_answer(self.row)
        return messages, {} if right is None else {"expected": right}

    async def step(self, action: Reply) -> Step:
        return await super().step(action if self.has_tools else Reply(action.content))

    def clone(self) -> Self:
        return copy.copy(self)

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        (scored,) = await self._scored([trajectory], self.own)
        self.metrics, self.extras = scored.metrics, scored.info
        return dict(scored.rewards) if self.scores_groups else self._gated(scored.rewards)

    async def score_group(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        scored = await self._scored(trajectories, self.compared)
        return [t.with_rewards(self._gated({n: t.rewards[n] for n in self.functions})) for t in scored]

    async def _scored(
        self, trajectories: Sequence[Trajectory], functions: Mapping[str, Reward]
    ) -> Sequence[Trajectory]:
        """Call each function once for all of them; return them with its rewards and with what it logged."""
        if not functions:
            return trajectories
        size, log = len(trajectories), RewardLog(len(trajectories))
        columns: dict[str, list[Any]] = {name: [value] * size for name, value in self.row.items()}
        columns["prompts"] = [self.prompt] * size
        columns["completions"] = [self._completion(t) for t in trajectories]
        columns["completion_ids"] = [[i for s in t.segments[1:] for i in s.token_ids] for t in trajectories]
        bound = {name: self._with_settings(function) for name, function in functions.items()}
        rewards = await call_rewards(bound, columns, log)
        return [
            replace(
                t.with_rewards(own), metrics={**t.metrics, **log.metrics}, info={**t.info, **log.extras_for(number)}
            )
            for number, (t, own) in enumerate(zip(trajectories, rewards, strict=True))
        ]

    def _completion(self, trajectory: Trajectory) -> Any:
        """Return the text of the last turn; all messages since the prompt where that is a list of messages, as TRL."""
        if isinstance(self.prompt, str):
            return get_final_text(trajectory.messages)
        return [dict(m) for m in trajectory.messages[self.prompt_messages :]]

    def _gated(self, parts: Mapping[str, float | None]) -> dict[str, float | None]:
        return dict(parts) if self.gate is None else apply_gate(parts, self.gate, self.gate_at_least)

    def _with_settings(self, function: Reward) -> Reward:
        """Add the environment's own settings that one of the shipped rewards takes."""
        if function is soft_overlong_punishment:
            return partial(function, **self.lengths)
        return partial(function, thought_marks=self.thought_marks) if _reads_thoughts(function) else function


def _reads_thoughts(function: Reward) -> bool:
    inner = function if inspect.isfunction(function) else type(function).__call__
    return inspect.isfunction(inner) and "thought_marks" in inspect.signature(inner).parameters


class _Some(Sequence[dataset.Row]):
    """A selection of a sequence of rows, without copying them."""

    def __init__(self, rows: Sequence[dataset.Row], places: Sequence[int]) -> None:
        self._rows, self._places = rows, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[self._places[index]]


def hold_out_rows(rows: Sequence[dataset.Row], column: str) -> dict[str, Sequence[dataset.Row]]:
    """Split rows: hold out the last tenth, 256 at most, with all copies of a prompt on one side.

    Going backwards, a prompt is held out where all its rows still fit. Where none does, it is the rarest one. Where all
    rows ask the same, it is the last tenth after all.
    """
    room = min(256, max(1, len(rows) // 10))
    places: dict[bytes, list[int]] = {}
    prompts: Any = rows[column] if hasattr(rows, "column_names") else (row[column] for row in rows)  # type: ignore[call-overload]
    for place, prompt in enumerate(prompts):
        places.setdefault(_question(prompt), []).append(place)
    held: set[int] = set()
    for copies in sorted(places.values(), key=lambda copies: -copies[-1]):
        if len(held) + len(copies) <= room:
            held.update(copies)
    if not held and len(places) > 1:
        rarest: list[int] = min(places.values(), key=len)
        held.update(rarest)
    held = held or set(range(len(rows) - room, len(rows)))
    return {
        "train": _Some(rows, [place for place in range(len(rows)) if place not in held]),
        "test": _Some(rows, sorted(held)),
    }


def _question(prompt: Any) -> bytes:
    """Compute a digest of what a prompt says, whatever its white space."""
    said = [prompt] if isinstance(prompt, str) else [f"{m['role']}: {m['content']}" for m in prompt]
    return blake2b(
        "\n".join(" ".join(text.split()) for text in said).encode("utf-8", "replace"), digest_size=12
    ).digest()


def _rows(data: Any, split: str, column: str) -> Sequence[dataset.Row]:
    rows = dataset.load_rows(data, split)
    if not len(rows):
        raise UserError(f"dataset {data!r:.80} has no rows")
    if not isinstance(rows[0], Mapping):
        raise UserError(f"dataset {data!r:.80}: a row is a dict with a {column!r}, not {rows[0]!r:.80}")
    if column not in rows[0]:
        raise UserError(
            f"dataset {data!r:.80} has no column {column!r}{suggest(column, rows[0])} (--env.prompt_column NAME)"
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
