"""The progress of the training, for reward functions: the fields of transformers' ``TrainerState`` that apply."""

from __future__ import annotations

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
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    save_steps: int = 0
    eval_steps: int = 0
    logging_steps: int = 1
    is_local_process_zero: bool = True  # rewards are computed in the first process only
    is_world_process_zero: bool = True


# One run is one event loop.
_state = RunVar[TrainerState]("agentrl_trainer_state")


def get_trainer_state() -> TrainerState:
    """Return the state of the training that this event loop runs."""
    return _state.get(TrainerState())


def set_trainer_state(state: TrainerState) -> None:
    """Replace the state of the training that this event loop runs."""
    _state.set(state)
