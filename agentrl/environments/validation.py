"""What an environment may return, checked: each slip is a sentence that names the method, the value and the form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.env import Env
from agentrl.errors import ContractError
from agentrl.types import Message, Observation, Step, Trajectory, utf8

ROLES = ("system", "user", "assistant", "tool")


def as_messages(observation: Observation) -> list[Message]:
    messages: Sequence[Message] = (
        [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    )
    return [{**m, "content": utf8(m["content"])} for m in messages]


def _check_observation(observation: Any, env: Env, method: str) -> None:
    if isinstance(observation, str):
        return
    good = isinstance(observation, Sequence) and all(
        isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in observation
    )
    if not good:
        raise ContractError(
            f"{type(env).__name__}.{method} returned the observation {observation!r:.120}; it must be a str, or a list "
            f"of messages such as {{'role': 'user', 'content': '...'}}, the role one of {', '.join(ROLES)}"
        )


def checked_reset(found: Any, env: Env) -> tuple[Observation, dict[str, Any]]:
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        raise ContractError(
            f"{type(env).__name__}.reset must return (observation, info), info a dict; got {found!r:.120}"
        )
    _check_observation(found[0], env, "reset")
    if not as_messages(found[0]):
        raise ContractError(f"{type(env).__name__}.reset returned no message")
    return found[0], dict(found[1])


def checked_step(found: Any, env: Env) -> Step:
    name = f"{type(env).__name__}.step"
    if not (isinstance(found, tuple) and len(found) == 5):
        raise ContractError(
            f"{name} must return (observation, reward, terminated, truncated, info); got {found!r:.120}"
        )
    step = Step(*found)
    _check_observation(step.observation, env, "step")
    if not _is_number(step.reward):
        raise ContractError(f"{name} returned the reward {step.reward!r:.80}, which is no finite number")
    if step.terminated not in (True, False) or step.truncated not in (True, False):
        raise ContractError(
            f"{name} returned terminated {step.terminated!r:.80} and truncated {step.truncated!r:.80}; each is a bool"
        )
    if not isinstance(step.info, dict):
        raise ContractError(f"{name} returned info {step.info!r:.80}, which is no dict")
    if not (step.terminated or step.truncated or as_messages(step.observation)):
        raise ContractError(f"{name} neither ended the episode nor returned a message for the model to answer")
    return step


def checked_rewards(found: Any, env: Env, method: str = "score") -> dict[str, float | None]:
    name = f"{type(env).__name__}.{method}"
    if not isinstance(found, Mapping):
        raise ContractError(f"{name} must return a dict of named rewards; got {found!r:.120}")
    for part, value in found.items():
        if value is not None and not _is_number(value):
            raise ContractError(f"{name} returned {value!r:.80} for {part!r}; a reward is a finite number, or None")
    return {str(part): None if value is None else float(value) for part, value in found.items()}


def checked_group(found: Any, trajectories: Sequence[Trajectory], env: Env) -> list[Trajectory]:
    name = f"{type(env).__name__}.score_group"
    same = isinstance(found, Sequence) and len(found) == len(trajectories)
    if not same or any(
        getattr(a, "segments", None) is not b.segments for a, b in zip(found, trajectories, strict=True)
    ):
        raise ContractError(
            f"{name} must return the {len(trajectories)} trajectories that it was given, in their order, each "
            f"trajectory.with_rewards({{...}}); got {found!r:.120}"
        )
    return [replace(t, rewards=checked_rewards(t.rewards, env, "score_group")) for t in found]


def _is_number(value: Any) -> bool:
    try:
        return abs(float(value)) < float("inf") and not isinstance(value, str)
    except (TypeError, ValueError, OverflowError):
        return False
