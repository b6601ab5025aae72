"""Validation of an environment's results: each slip is a sentence that names the method, the value and the form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.environments.env import Env
from agentrl.errors import ContractError
from agentrl.settings.secret import scrub
from agentrl.types import Message, Observation, Step, Trajectory, is_number, join_thought, to_utf8

ROLES = ("system", "user", "assistant", "tool")


def as_messages(observation: Observation) -> list[Message]:
    """Convert an observation to messages; a text is the user's."""
    messages: Sequence[Message] = (
        [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    )
    return [{**m, "content": to_utf8(scrub(m["content"]))} for m in map(_join_thought, messages)]


def _join_thought(message: Message) -> Message:
    """Write a thought that stands beside an assistant's content into it."""
    thought = message.get("reasoning_content")
    if message["role"] != "assistant" or not isinstance(thought, str) or not thought:
        return message
    joined: Message = {**message, "content": join_thought(thought, message["content"])}
    del joined["reasoning_content"]
    return joined


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


def validate_reset(result: Any, env: Env) -> tuple[Observation, dict[str, Any]]:
    """Return the result of ``reset``. Raises ContractError if it is not (observation, info)."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise ContractError(
            f"{type(env).__name__}.reset must return (observation, info), info a dict; got {result!r:.120}"
        )
    _check_observation(result[0], env, "reset")
    if not as_messages(result[0]):
        raise ContractError(f"{type(env).__name__}.reset returned no message")
    return result[0], dict(result[1])


def validate_step(result: Any, env: Env) -> Step:
    """Return the result of ``step``. Raises ContractError if it is not Gymnasium's five."""
    name = f"{type(env).__name__}.step"
    if not (isinstance(result, tuple) and len(result) == 5):
        raise ContractError(
            f"{name} must return (observation, reward, terminated, truncated, info); got {result!r:.120}"
        )
    step = Step(*result)
    _check_observation(step.observation, env, "step")
    if not is_number(step.reward):
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


def validate_rewards(result: Any, env: Env, method: str = "score") -> dict[str, float | None]:
    """Return the result of ``score``. Raises ContractError if it is not a dict of numbers."""
    name = f"{type(env).__name__}.{method}"
    if not isinstance(result, Mapping):
        raise ContractError(f"{name} must return a dict of named rewards; got {result!r:.120}")
    for part, value in result.items():
        if value is not None and not is_number(value):
            raise ContractError(f"{name} returned {value!r:.80} for {part!r}; a reward is a finite number, or None")
    return {str(part): None if value is None else float(value) for part, value in result.items()}


def validate_group(result: Any, trajectories: Sequence[Trajectory], env: Env) -> list[Trajectory]:
    """Return the result of ``score_group``. Raises ContractError if it is not the group's trajectories."""
    name = f"{type(env).__name__}.score_group"
    same = isinstance(result, Sequence) and len(result) == len(trajectories)
    if not same or any(
        getattr(a, "segments", None) is not b.segments for a, b in zip(result, trajectories, strict=True)
    ):
        raise ContractError(
            f"{name} must return the {len(trajectories)} trajectories that it was given, in their order, each "
            f"trajectory.with_rewards({{...}}); got {result!r:.120}"
        )
    return [replace(t, rewards=validate_rewards(t.rewards, env, "score_group")) for t in result]


def check_attributes(env: Env) -> None:
    """Raise ContractError where an environment's ``max_turns``, ``reward_weights``, best or worst reward is wrong."""
    name, turns, weights = type(env).__name__, env.max_turns, env.reward_weights
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        raise ContractError(f"{name}.max_turns is {turns!r:.80}; it is a whole number of turns, 1 or more")
    if not isinstance(weights, Mapping) or not all(isinstance(n, str) and is_number(w) for n, w in weights.items()):
        raise ContractError(
            f"{name}.reward_weights is {weights!r:.80}; it is a dict of a finite number for each reward"
        )
    if not isinstance(env.template_words, Mapping) or not all(isinstance(word, str) for word in env.template_words):
        raise ContractError(
            f"{name}.template_words is {env.template_words!r:.80}; it is a dict of a value for each word that the chat "
            "template reads"
        )
    for attribute in ("best_reward", "worst_reward"):
        if not is_number(value := getattr(env, attribute)):
            raise ContractError(f"{name}.{attribute} is {value!r:.80}; it is a finite number")


def check_records(env: Env) -> None:
    """Raise ContractError where an environment's ``metrics`` or ``extras``, at the end of an episode, are no such."""
    name, logged, extras = type(env).__name__, env.metrics, env.extras
    if not isinstance(logged, Mapping) or not all(isinstance(n, str) and is_number(v) for n, v in logged.items()):
        raise ContractError(f"{name}.metrics is {logged!r:.120}; it is a dict of a finite number for each name")
    if not isinstance(extras, Mapping) or not all(isinstance(n, str) for n in extras):
        raise ContractError(f"{name}.extras is {extras!r:.120}; it is a dict by names")
