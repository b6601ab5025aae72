"""The progress of the training, for reward functions: the fields of transformers' ``TrainerState`` that apply."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from anyio.lowlevel import RunVar


@dataclass(frozen=True)
class TrainerState:
    """A training's progress.

    Args:
        global_step: updates of the policy so far; 0 while the first batch is played, and outside of a training.
        max_steps: updates there will be.
        epoch: passes over the environment's tasks so far; 0.0 where it has any number of them.
        save_steps, eval_steps: steps between checkpoints, and between evaluations; 0: none.
        log_history: the rows of the last 100 steps as metrics.jsonl has them, the latest last; a resumed run has them
            too. ``log_history[-1]["rewards/NAME/mean"]`` is what a reward's mean was one step ago.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    save_steps: int = 0
    eval_steps: int = 0
    logging_steps: int = 1
    log_history: Sequence[Mapping[str, float]] = ()
    is_local_process_zero: bool = True  # rewards are computed in the first process only
    is_world_process_zero: bool = True


HISTORY = 100  # steps that log_history holds

_INITIAL = TrainerState()  # one object, so that who keeps it sees whether another one has come

# One run is one event loop.
_state = RunVar[TrainerState]("agentrl_trainer_state")
_replayed: ContextVar[TrainerState | None] = ContextVar("agentrl_replayed_trainer_state", default=None)


def get_trainer_state() -> TrainerState:
    """Return the state of the training that this event loop runs, or that episodes to be rescored come from."""
    replayed = _replayed.get()
    return _state.get(_INITIAL) if replayed is None else replayed


def set_trainer_state(state: TrainerState) -> None:
    """Replace the state of the training that this event loop runs."""
    _state.set(state)


@contextmanager
def replay_trainer_state(state: TrainerState) -> Iterator[None]:
    """Let rewards of this task see the state of an earlier step until the block ends."""
    token = _replayed.set(state)
    try:
        yield
    finally:
        _replayed.reset(token)
