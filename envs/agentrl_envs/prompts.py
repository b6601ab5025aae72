"""prompts: a dataset with a ``prompt`` column and reward functions as TRL has them; with ``--tools`` several turns."""

from __future__ import annotations

import copy
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

from agentrl import ContractError, Reply, Step, ToolEnv, Trajectory, UserError
from agentrl.errors import NoExpertError, suggest
from agentrl.rewards.functions import Reward, call_rewards, is_per_episode, resolve_rewards
from agentrl.rewards.reward_log import RewardLog
from agentrl.runs.episode_info import find_expected_answer
from agentrl.runtime.threads import run_in_thread
from agentrl.types import THOUGHT_MARKS, ExpertTurn, Message, Observation, get_final_text
from agentrl_envs.prompt_rows import PromptColumns, PromptRows, load_prompt_rows, name_test_splits
from agentrl_envs.rewards import apply_gate, soft_overlong_punishment


class Prompts(ToolEnv[PromptRows]):
    """GRPO on a dataset. A task is a row; its prompt is a string, or a list of messages.

    Without tools an episode is one turn. With tools (``--tools calculator,my_tools.py:add``) it ends with the first
    turn that calls none, after ``rollout.max_turns`` turns (8) at the latest.

    Args:
        data: a .jsonl or .parquet file, a Hugging Face dataset's name (``name:config``), a ``Dataset``, an
            ``IterableDataset``, a dict of splits, a DataFrame, or rows.
        rewards: functions ``f(prompts, completions, **columns) -> list[float | None]``, sync or async, called once a
            group, or once an episode where marked `agentrl.rewards.per_episode`; or names:
            those of docs/rewards.md, ``module:function``, or ``reward-model:FOLDER_OR_NAME``, a sequence classifier; or
            such a model, loaded, or a ``RewardModel``. One function needs no list.
        reward_weights: one weight a reward; 1 by default.
        reward_settings: of rewards that take some, by name: ``--env.reward_settings.regex.pattern X``.
        gate, gate_at_least: a reward that must be as good as that for the others to count: see docs/rewards.md.
        test_data: rows for evaluation, or several datasets by name, each a split of that name: ``{"math": FILE}``.
            Without it the last tenth of ``data`` (256 rows at most) is held out, all copies of a prompt on one side.
        test_split: of ``data``: the split for evaluation.
        test_rows: how many rows of ``data`` are held out, of a stream the first ones.
        split, revision, data_files: of a Hugging Face dataset, as ``datasets.load_dataset`` takes them.
        streaming: read ``data`` as the run needs it, and keep 4,096 rows; an ``IterableDataset`` is read so anyway.
        shuffle_buffer: of a stream: rows that are shuffled among each other, 1,000 by default; 0: none.
        prompt_column, solution_column: the columns that hold the prompt, and what rewards get as ``solution``; a name
            with dots is a column in a column.
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
        rewards: Sequence[str | Reward] | Reward = ("accuracy",),
        reward_weights: Sequence[float] | None = None,
        reward_settings: Mapping[str, Mapping[str, Any]] | None = None,
        gate: str | None = None,
        gate_at_least: float = 1.0,
        test_data: Any = None,
        test_split: str | None = None,
        test_rows: int | None = None,
        split: str | None = None,
        revision: str | None = None,
        data_files: Any = None,
        streaming: bool = False,
        shuffle_buffer: int | None = None,
        prompt_column: str = "prompt",
        solution_column: str | None = None,
        system_prompt: str = "",
        max_completion_len: int = 512,
        soft_punish_cache: int = 128,
        thought_marks: Sequence[str] = THOUGHT_MARKS,
    ) -> None:
        self.columns, self.system_prompt = PromptColumns(prompt_column, solution_column), system_prompt
        self.held_out = name_test_splits(test_data)
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
    async def open_shared(cls, **settings: Any) -> AsyncIterator[PromptRows]:
        """Load the rows by split, or begin their stream, once a run."""
        if "data" not in settings:
            raise UserError("env 'prompts' needs a dataset: --env.data FILE.jsonl (or data=... in Python)")
        columns = PromptColumns(settings.get("prompt_column", "prompt"), settings.get("solution_column"))
        used = resolve_rewards(settings.get("rewards", ("accuracy",)), settings.get("reward_settings")).values()
        async with AsyncExitStack() as held:
            for function in used:
                if hasattr(function, "close"):
                    held.push_async_callback(function.close)
                if hasattr(function, "load"):  # what cannot be had is told before the first episode
                    await function.load()
            rows = await run_in_thread(partial(load_prompt_rows, settings, columns))
            held.push_async_callback(rows.close)
            yield rows

    def list_splits(self) -> Sequence[str]:
        return ("train", *self.held_out)

    def count(self, split: str) -> int | None:
        return self.shared.count(split)

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        split = (options or {}).get("split", "train")
        self.split = split
        self.prompt, self.row = self.columns.split(await self.shared.row(split, seed), f"row {seed + 1} of {split}")
        messages: list[Message] = (
            [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else list(self.prompt)
        )
        if self.system_prompt and messages[0]["role"] == "system":
            raise UserError(
                f"row {seed + 1} of {split} begins with a system message of its own: leave env.system_prompt out"
            )
        if self.system_prompt:
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        self.prompt_messages = len(messages)
        words = self.row.get("chat_template_kwargs")
        self.template_words = (
            {word: value for word, value in words.items() if value is not None} if isinstance(words, Mapping) else {}
        )
        right = find_expected_answer(self.row)
        return messages, {} if right is None else {"expected": right}

    async def step(self, action: Reply) -> Step:
        return await super().step(action if self.has_tools else Reply(action.content))

    def clone(self) -> Self:
        return copy.copy(self)

    async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
        """Say the row's ``completion``: a text, or a list of one message of the assistant's."""
        said = self.row.get("completion")
        if isinstance(said, Sequence) and not isinstance(said, str) and len(said) == 1:
            said = said[0].get("content") if isinstance(said[0], Mapping) else said
        if not isinstance(said, str) or not said:
            raise NoExpertError(
                "env 'prompts' has an expert where each row has a `completion`, a text or one message of the "
                f"assistant's; this row has {said!r:.60}"
            )
        yield said

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        (scored,) = await self._scored([trajectory], self.own)
        self.metrics, self.extras = scored.metrics, scored.info
        self.reward_weights = {**self.reward_weights, **scored.weights}
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
        columns["completion_ids"] = [
            [i for s in t.segments if s.author != "prompt" for i in s.token_ids] for t in trajectories
        ]
        bound = {name: self._with_settings(function) for name, function in functions.items()}
        rewards = await call_rewards(bound, columns, log)
        return [
            replace(
                t.with_rewards(own),
                metrics={**t.metrics, **log.metrics},
                info={**t.info, **log.extras_for(number)},
                weights={**t.weights, **(log.weights if self.split == "train" else {})},  # held-out rewards compare
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
