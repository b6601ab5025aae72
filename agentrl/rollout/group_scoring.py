"""The scoring of a group as one: once all its episodes have ended, and been scored each by itself."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace

import anyio

from agentrl.contract import checked_group
from agentrl.env import Env
from agentrl.errors import ContractError, UserError, WorldFault
from agentrl.types import Fault, Stop, Trajectory


async def score_group(env: Env, trajectories: Sequence[Trajectory], timeout_s: float) -> list[Trajectory]:
    """Return the members with what `Env.score_group` says of them; those that the world failed as they are.

    What goes wrong in it is the fault of each member that was to be scored: a comparison of some is none.

    Args:
        env: of one of them.
        timeout_s: of the call.

    Raises:
        UserError: the environment broke its contract.
    """
    fair = [t for t in trajectories if t.fault is None]
    if not fair:
        return list(trajectories)
    try:
        scored = checked_group(await _called(env, fair, timeout_s), fair, env)
    except UserError:
        raise
    except WorldFault as fault:
        scored = _faulted(fair, Fault(fault.kind, str(fault)))
    except Exception:  # belongs to the boundary around an episode
        where = f"{type(env).__name__}.score_group of task {fair[0].task}"
        scored = _faulted(fair, Fault("env_score", f"{where}: {traceback.format_exc(limit=-4)}"))
    left = iter(scored)
    return [t if t.fault is not None else next(left) for t in trajectories]


async def _called(env: Env, fair: Sequence[Trajectory], timeout_s: float) -> object:
    call = env.score_group(fair)
    if not hasattr(call, "__await__"):
        raise ContractError(f"{type(env).__name__}.score_group must be `async def`; it returned {call!r:.80}")
    with anyio.move_on_after(timeout_s):
        return await call
    where = f"{type(env).__name__}.score_group of task {fair[0].task}"
    raise WorldFault("turn_timeout", f"{where} took over {timeout_s:g} s")


def _faulted(fair: Sequence[Trajectory], fault: Fault) -> list[Trajectory]:
    return [replace(t, stop=Stop.FAULT, fault=fault) for t in fair]
