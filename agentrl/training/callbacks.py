"""Callbacks: they hear what happens in a run, and may ask it to evaluate, to save, or to end."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from agentrl.errors import ContractError, author_errors, suggest
from agentrl.runtime.stalls import Progressing, describe_waits, find_longest_wait
from agentrl.runtime.threads import open_task_group
from agentrl.settings import registry
from agentrl.types import Trajectory

if TYPE_CHECKING:
    from agentrl.evaluation.measurement import Evaluation
    from agentrl.resources import TrainingResources
    from agentrl.runs.folder import RunFolder


@dataclass
class TrainerControl:
    """The wishes of the callbacks, by the names of transformers. The run heeds them once the step has ended.

    ``should_evaluate`` and ``should_save`` hold for one step, ``should_training_stop`` from then on: the run ends after
    the step as after its last one, with a checkpoint, the model, an evaluation and the summary.
    """

    should_training_stop: bool = False
    should_evaluate: bool = False
    should_save: bool = False

    def begin_step(self) -> None:
        """Forget what was wished for the step before."""
        self.should_evaluate = self.should_save = False


class Callback:
    """A listener to a run, which does nothing: override what you want to hear. All methods are plain functions.

    ``control`` is there as soon as the run begins: ``self.control.should_training_stop = True`` ends it.
    """

    control: TrainerControl

    def on_train_begin(self, resources: TrainingResources, run: RunFolder) -> None:
        """Hear that the model is loaded and the run folder is there."""

    def on_step_begin(self, step: int) -> None:
        """Hear that a step begins: its groups are waited for."""

    def on_phase_begin(self, name: str, episodes: int) -> None:
        """Hear that a rollout of so many episodes, an evaluation or an update (0) begins."""

    def on_episode_end(self, trajectory: Trajectory) -> None:
        """Hear of an episode as it ends."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hear the row of a step in metrics.jsonl, once it is written."""

    def on_evaluate(self, step: int, evaluation: Evaluation) -> None:
        """Hear what the policy after `step` earned on held-out tasks."""

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hear each row of metrics.jsonl, a step's and an evaluation's, once it is written."""

    def on_save(self, step: int, checkpoint: Path) -> None:
        """Hear that the checkpoint of `step` is written, and where."""

    def on_train_end(self, summary: Mapping[str, Any]) -> None:
        """Hear what summary.json holds, as the last thing; not if the run ends by an error."""

    def on_interrupt(self, by: str) -> None:
        """Hear of the first Ctrl-C or signal: the run saves and returns."""

    def on_message(self, text: str) -> None:
        """Hear a sentence of the run: an alarm, a sign of trouble, a checkpoint that could not be written."""

    def on_waiting(self, text: str) -> None:
        """Hear, once a second, what the run waits for; an empty text where it goes on."""

    def state(self) -> object:
        """Return what a resumed run gives to ``load``: numbers, texts, lists, dicts, tensors; None for nothing."""
        return None

    def load(self, state: Any) -> None:
        """Restore a ``state`` from the checkpoint that the run resumes from."""


class Callbacks(Callback):
    """Several callbacks as one, with one ``control``. What one raises ends the run.

    Args:
        callbacks: in the order in which they hear.
        named: those of them that the settings name: what one raises becomes a sentence. What another raises stays as it
            is, for the program that passed it.
    """

    def __init__(self, callbacks: Sequence[Callback], named: Sequence[Callback] = ()) -> None:
        self.control = TrainerControl()
        self._named = frozenset(map(id, named))
        for callback in callbacks:
            _check_hooks(callback)
            callback.control = self.control
        self._by_name = _name_each(callbacks)
        for name in _HOOKS:
            setattr(self, name, partial(self._call_each, callbacks, name))

    def _call_each(self, callbacks: Sequence[Callback], name: str, *arguments: object) -> None:
        for callback in callbacks:
            with self._explain_errors(callback, name):
                getattr(callback, name)(*arguments)

    def _explain_errors(self, callback: Callback, method: str) -> AbstractContextManager[None]:
        what = f"callback {type(callback).__name__}.{method}"
        return author_errors(what) if id(callback) in self._named else nullcontext()

    def state(self) -> dict[str, object]:
        """Return the states of those that have one, by the names of their classes.

        Raises:
            ContractError: one is nothing that a checkpoint can hold.
        """
        from agentrl.training.plain_state import encode  # brings torch

        states = {}
        for name, callback in self._by_name.items():
            with self._explain_errors(callback, "state"):
                states[name] = callback.state()
        for name, state in states.items():
            try:
                encode(state)
            except TypeError as error:
                raise ContractError(f"{name}.state returns what no checkpoint can hold: {error}") from None
        return {name: state for name, state in states.items() if state is not None}

    def load(self, state: Mapping[str, object]) -> None:
        """Restore the states of callbacks that are here again; those of others are left out."""
        for name, callback in self._by_name.items():
            if name in state:
                with self._explain_errors(callback, "load"):
                    callback.load(state[name])


def load_callbacks(names: Sequence[str]) -> list[Callback]:
    """Load callbacks by name: classes and functions are called without arguments, objects are taken as they are.

    Raises:
        UserError: there is no such name, or it is no callback.
    """
    callbacks = []
    for name in names:
        thing = registry.load_registered("callback", name)
        if isinstance(thing, type) or inspect.isfunction(thing):
            with author_errors(f"callback {name!r}"):
                thing = thing()
        _check_hooks(thing)
        callbacks.append(thing)
    return callbacks


_HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


def _name_each(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Name callbacks by their classes; a second one of a class has its number behind the name."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        name = type(callback).__qualname__
        count = sum(type(other).__qualname__ == name for other in named.values())
        named[f"{name} {count + 1}" if count else name] = callback
    return named


def _check_hooks(callback: Callback) -> None:
    """Raise ContractError for what is no callback, or has a hook that nobody would call, or that is async."""
    if not isinstance(callback, Callback):
        raise ContractError(
            "callbacks takes objects of subclasses of agentrl.Callback or of transformers.TrainerCallback, not "
            f"{callback!r:.80}"
        )
    for name in dir(callback):
        if not name.startswith("on_"):
            continue
        if name not in _HOOKS:
            raise ContractError(f"{type(callback).__name__}.{name}: there is no such callback{suggest(name, _HOOKS)}")
        if inspect.iscoroutinefunction(getattr(callback, name)):
            raise ContractError(f"{type(callback).__name__}.{name} must be a plain `def`, not `async def`")


@asynccontextmanager
async def report_waits(playing: Progressing, callback: Callback) -> AsyncIterator[None]:
    """Tell the callback what is waited for: once a second where it lasts, and as a message on SIGUSR1."""

    async def report_on_signal() -> None:
        with anyio.open_signal_receiver(signal.SIGUSR1) as signals:
            async for _ in signals:
                callback.on_message(describe_waits(playing.waits()))

    async def report_now_and_then() -> None:
        while True:
            await anyio.sleep(1.0)
            waits = playing.waits()
            callback.on_waiting(describe_waits(waits) if find_longest_wait(waits) > 2.0 else "")

    async with open_task_group() as tasks:
        if hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread():
            tasks.start_soon(report_on_signal)
        tasks.start_soon(report_now_and_then)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()
