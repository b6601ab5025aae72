"""The scoring of a group as one: once all its episodes have ended, and been scored each by itself."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence
from dataclasses import replace

import anyio

from agentrl.environments.env import Env
from agentrl.environments.validation import validate_group
from agentrl.errors import ContractError, InfraError, UserError, is_failure
from agentrl.types import Fault, Stop, Trajectory


async def score_group(env: Env, trajectories: Sequence[Trajectory], timeout_s: float) -> list[Trajectory]:
    """Return the members with what `Env.score_group` says of them; faulted ones as they are.

    A failure is the fault of each member that was to be scored: a comparison of some is none.

    Args:
        env: of one of them.
        timeout_s: of the call.

    Raises:
        UserError: the environment broke its contract.
    """
    valid = [t for t in trajectories if t.fault is None]
    if not valid:
        return list(trajectories)
    try:
        scored = validate_group(await _call_score_group(env, valid, timeout_s), valid, env)
    except UserError:
        raise
    except InfraError as fault:
        scored = _with_fault(valid, Fault(fault.kind, str(fault)))
    except BaseException as error:  # belongs to the boundary around an episode
        if not is_failure(error):
            raise
        where = f"{type(env).__name__}.score_group of task {valid[0].task}"
        scored = _with_fault(valid, Fault("env_score", f"{where}: {traceback.format_exc(limit=-4)}"))
    left = iter(scored)
    return [t if t.fault is not None else next(left) for t in trajectories]


async def _call_score_group(env: Env, valid: Sequence[Trajectory], timeout_s: float) -> object:
    call = env.score_group(valid)
    if not hasattr(call, "__await__"):
        raise ContractError(f"{type(env).__name__}.score_group must be `async def`; it returned {call!r:.80}")
    where = f"{type(env).__name__}.score_group of task {valid[0].task}"
    with anyio.move_on_after(timeout_s):
        try:
            return await call
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise InfraError("env_score", f"{where} raised CancelledError") from None
    raise InfraError("turn_timeout", f"{where} took over {timeout_s:g} s")


def _with_fault(valid: Sequence[Trajectory], fault: Fault) -> list[Trajectory]:
    return [replace(t, stop=Stop.FAULT, fault=fault) for t in valid]
