"""A run whose processes are started, kept and ended here: servers first, then the learner's ranks, which sample there.

Where the processes are is a launcher's choice (`agentrl.launch.run_launchers`). What dies is started again: a server by
itself, the ranks all together, at the newest checkpoint. The status of the run is that of its first rank; where another
one is why it ended, the status is that one's, which is said.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from agentrl.engines.server_keys import KEY_ENV, choose_key
from agentrl.errors import ContractError, UserError, author_errors
from agentrl.launch.kept_server import KeptServer
from agentrl.launch.rank_group import RankGroup, Relay
from agentrl.launch.run_process import Placement, RunPlan, Say
from agentrl.runs.folder import LAUNCH_OPTIONS
from agentrl.runtime import threads
from agentrl.runtime.interruption import Interruption
from agentrl.settings.registry import load_entry

PASSED_ON = ("AGENTRL_", "GLOO_", "HF_", "NCCL_", "OMP_", "PYTHONPATH", "VLLM_")
_REPLACED_S = 60.0  # that a place for the ranks may take to be found again, at the least


def supervise(plan: RunPlan, launcher: str, relay: Relay, say: Say) -> int:
    """Run a plan to its end; return the exit status of its first rank, or of the one that ended it, which is said.

    The first signal lets the run save and end, as that of a run in one process; the second ends all at once.

    Args:
        launcher: a name of `agentrl list run_launchers`, or ``module:function``.
        relay: returns what takes the output of a process, by its name.
        say: takes a sentence of this module's for whoever looks at the run.

    Raises:
        UserError: there is no such launcher, or it finds no places; a server or a rank cannot be started.
        Interrupted: by the second signal, or by the first one before the ranks have begun.
    """
    stop = Interruption()
    with stop.install_handlers():
        status: int = threads.run_sync(_supervise, plan, launcher, relay, say, stop)
        return status


async def _supervise(plan: RunPlan, launcher: str, relay: Relay, say: Say, stop: Interruption) -> int:
    status = 1
    places = _open_places(plan, launcher, say)
    async with stop.cancel_on_signal(), places as placement, threads.open_task_group() as tasks:
        run = _SupervisedRun(plan, placement, relay, say)
        for server in run.servers:
            tasks.start_soon(server.keep)
        for server in run.servers:
            await server.settle()
        stop.tell = lambda _: run.group.end(stop.signal or signal.SIGINT)
        stop.begun = True
        status = await run.group.run()
        tasks.cancel_scope.cancel()
    return status


@asynccontextmanager
async def _open_places(plan: RunPlan, launcher: str, say: Say) -> AsyncIterator[Placement]:
    """Hold the places that a launcher finds. Raises ContractError: the launcher fails, or finds too few or too many."""
    entry: Any = load_entry("run_launcher", launcher)
    async with AsyncExitStack() as stack:
        with author_errors(f"launcher {launcher!r}"):
            placement = await stack.enter_async_context(entry(plan, say))
        if not isinstance(placement, Placement):
            raise ContractError(f"launcher {launcher!r}: its block gives {placement!r}, which is no Placement")
        if (there := len(placement.processes)) != (needed := len(plan.list_names())):
            raise ContractError(
                f"launcher {launcher!r}: its Placement has {there} processes, and plan.list_names() {needed}"
            )
        yield placement


class _SupervisedRun:
    """The servers and the ranks of a run, at their places."""

    def __init__(self, plan: RunPlan, placement: Placement, relay: Relay, say: Say) -> None:
        self._arguments, self._say = (*plan.arguments, *placement.arguments), say
        self._told: tuple[str, ...] = ()  # the servers' addresses, as the ranks have them
        environment = {**_pass_on_settings(), **placement.environment, KEY_ENV: choose_key()}
        environment[LAUNCH_OPTIONS] = shlex.join(plan.options)
        wait_s = max(plan.wait_s, _REPLACED_S)
        self.servers = [
            KeptServer(
                process,
                plan.serve_arguments,
                environment,
                spans_machines=placement.spans_machines,
                wait_s=wait_s,
                write=relay(process.name),
                say=say,
                on_answer=self._renew_if_moved,
            )
            for process in placement.processes[plan.ranks :]
        ]
        self.group = RankGroup(
            placement.processes[: plan.ranks],
            self._choose_arguments,
            environment,
            max_restarts=plan.max_restarts,
            wait_s=wait_s,
            relay=relay,
            say=say,
        )

    async def _choose_arguments(self) -> list[str]:
        """Choose the arguments of every rank, with the servers where they are now. Raises UserError: none is left."""
        self._told = ()
        for server in self.servers:
            if not server.is_settled:
                self._say(f"the learner's processes wait for {server.name} to answer")
            await server.settle()
        self._told = tuple(server.url for server in self.servers if server.answers)
        if self.servers and not self._told:
            raise UserError("no server of the run starts any more; what they wrote stands above")
        engine = ["--engine", "server", "--engine.urls", ",".join(self._told)]
        return [*self._arguments, *(engine if self._told else [])]

    def _renew_if_moved(self) -> None:
        """Let the ranks begin again where a server answers at an address that they do not know."""
        moved = any(server.answers and server.url not in self._told for server in self.servers)
        if self._told and moved and self.group.renew():
            self._say("a server answers at another address: the run saves, and begins again with that one")


def _pass_on_settings() -> dict[str, str]:
    """Return the variables of this process that each one of the run has too, wherever it is."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
