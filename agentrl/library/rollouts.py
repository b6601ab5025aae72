"""`open_rollouts`: batches of groups for a loop of your own, with `async for` or with `for`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal, start_blocking_portal

from agentrl.environments.curriculum import Curriculum
from agentrl.environments.env import Env
from agentrl.environments.spec import EnvSpec
from agentrl.errors import ConfigError
from agentrl.models.policy import Policy, resolve_settings
from agentrl.resources import TrainingResources, open_resources
from agentrl.rollout.scheduler import BatchPlan, RolloutScheduler, StepBatch, open_scheduler
from agentrl.settings.names.adoption import take_env_names
from agentrl.settings.schema import TrainConfig
from agentrl.settings.signature import convert_value
from agentrl.training.algorithm import build_task_sampler

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")
_OF_YOUR_OWN = ("learner", "run", "eval", "epochs", "stages")  # what a loop of one's own does by itself


class Rollouts:
    """The batches of an environment, sampled from a model: ``steps`` of them.

    While you learn from a batch, the next ones are begun as far as ``rollout.max_staleness`` allows; with 0, the
    default, a batch begins when it is asked for, with the weights of the last `update_weights`.
    """

    def __init__(self, resources: TrainingResources, scheduler: RolloutScheduler) -> None:
        self.resources, self._scheduler = resources, scheduler
        self.version = self._taken = 0  # of the weights; batches
        self._is_new = True  # the weights, since the last batch

    @property
    def model(self) -> PreTrainedModel | PeftModel:
        """Return the model that is sampled from, to be trained in place."""
        return self.resources.policy.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.resources.policy.tokenizer

    async def next_batch(self) -> StepBatch | None:
        """Return the next batch of groups; None after the last.

        Raises:
            UserError: an environment, tool or reward broke its contract.
        """
        if self._taken == self.resources.config.steps:
            return None
        if not self._is_new:
            self._scheduler.advance()  # another batch of the same weights
        self._taken, self._is_new = self._taken + 1, False
        return await self._scheduler.next_batch()

    async def update_weights(self, version: int | None = None) -> None:
        """Give the engine the model's present weights, from which the next episodes are sampled.

        Args:
            version: their number, which tokens carry: ``learner.version``; one more than the last by default.
        """
        self.version = self.version + 1 if version is None else version
        await self.resources.engine.update_weights(self.model, self.version)
        if not self._is_new:
            self._scheduler.advance()
            self._is_new = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepBatch:
        if (batch := await self.next_batch()) is None:
            raise StopAsyncIteration
        return batch


class SyncRollouts:
    """`Rollouts` for a loop without an event loop: they run in a thread of their own."""

    def __init__(self, rollouts: Rollouts, portal: BlockingPortal, ended: Future[None]) -> None:
        self._rollouts, self._portal, self._ended = rollouts, portal, ended
        self.model, self.tokenizer = rollouts.model, rollouts.tokenizer

    def update_weights(self, version: int | None = None) -> None:
        """Give the engine the model's present weights, as `Rollouts.update_weights`."""
        self._call(partial(self._rollouts.update_weights, version))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepBatch:
        if (batch := self._call(self._rollouts.next_batch)) is None:
            raise StopIteration
        return batch

    def _call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Return the function's result; raise what ended the rollouts meanwhile."""
        task = self._portal.start_task_soon(function)
        try:
            futures: list[Future[Any]] = [task, self._ended]
            wait(futures, return_when=FIRST_COMPLETED)
            if not task.done():
                self._ended.result()
            return task.result()
        finally:
            task.cancel()


class OpenRollouts:
    """Rollouts to be entered, once, by ``async with`` or by ``with``."""

    def __init__(
        self, config: TrainConfig, spec: EnvSpec, loaded: Policy | None, curriculum: Curriculum | None
    ) -> None:
        self._config, self._spec, self._loaded, self._curriculum = config, spec, loaded, curriculum
        self._stack, self._async_stack = ExitStack(), AsyncExitStack()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Rollouts]:
        async with open_resources(self._config, self._spec, self._loaded, learns=True) as resources:
            config = resources.config
            tasks = build_task_sampler(config, resources.spec.count("train"), self._curriculum)
            plan = BatchPlan.from_config(config)
            async with open_scheduler(resources.rollout("train"), tasks, plan, seed=config.seed) as scheduler:
                yield Rollouts(resources, scheduler)

    async def _hold(self, *, task_status: TaskStatus[tuple[Rollouts, anyio.Event]]) -> None:
        """Keep the rollouts open until the event is set. What fails in them ends this."""
        async with self._open() as rollouts:
            closing = anyio.Event()
            task_status.started((rollouts, closing))
            await closing.wait()

    async def __aenter__(self) -> Rollouts:
        return await self._async_stack.enter_async_context(self._open())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._async_stack.__aexit__(kind, error, trace)

    def __enter__(self) -> SyncRollouts:
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            ended, (rollouts, closing) = portal.start_task(self._hold)
            stack.push(partial(_close, portal, ended, closing))
            self._stack = stack.pop_all()
        return SyncRollouts(rollouts, portal, ended)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)


def _close(
    portal: BlockingPortal,
    ended: Future[None],
    closing: anyio.Event,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Close the rollouts; raise what ended them, unless the block was left by an error of its own."""
    if not ended.done():
        portal.call(closing.set)
    if (failure := ended.exception()) is not None and error is None:
        raise failure


def open_rollouts(
    env: str | type[Env],
    model: Any = "nano",
    *,
    tokenizer: Any = None,
    env_args: Mapping[str, Any] | None = None,
    curriculum: Curriculum | None = None,
    **settings: Any,
) -> OpenRollouts:
    """Open an environment, a model and an engine, for a loop of your own over batches of groups.

    ::

        with open_rollouts("math-tools", steps=30) as rollouts:    # or: async with
            for batch in rollouts:                                 # async for
                ...                                                # learn from batch.groups
                rollouts.update_weights()                          # await

    Args:
        env, model, tokenizer, env_args, curriculum: as in `agentrl.train`.
        settings: as in a config file: ``steps=30, rollout={"group_size": 8}, engine=..., lora=..., seed=1``.

    Raises:
        UserError: a setting is wrong, or of the part that is yours here.
    """
    _check_yours(list(settings))
    named_otherwise, settings = take_env_names(settings)
    own = convert_value("env_args", {} if env_args is None else env_args, dict[str, Any])
    spec = EnvSpec(env, **named_otherwise, **own)
    spec.check_run_settings(settings)
    config, loaded = resolve_settings({"env": {"name": spec.name, **spec.settings}, **settings}, model, tokenizer)
    return OpenRollouts(config, spec.with_tools(config.tools, config.tool), loaded, curriculum)


def _check_yours(names: Sequence[str]) -> None:
    """Refuse settings that do nothing here, by a ConfigError."""
    for name in names:
        if name in _OF_YOUR_OWN:
            raise ConfigError(f"{name} does nothing with open_rollouts: the loop is yours (docs/library.md)")
