"""Ranks and servers as tasks of an existing Ray cluster, which places them by their resources. Ray is an extra.

A task holds one process, which it starts, reads and signals by plain strings and numbers. A placement group keeps the
room of all of them together. Where a node is lost, Ray finds another place for what was there, if there is room.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
from anyio import to_thread

from agentrl.engines.server_keys import choose_key
from agentrl.errors import UserError
from agentrl.launch.child_process import ChildProcess
from agentrl.launch.run_process import MachineLost, Placement, RunPlan, Say, Write, follow_polls, refuse_room
from agentrl.players import ray_tasks
from agentrl.players.connection import KEY_ENV
from agentrl.settings.registry import check_package

CALLS = 8  # of one task at a time: it is read while it is signalled
KILL_S = 15.0  # that a task has to end its process, before the task is ended
_PLAYERS = {"players.launcher": "ray", "players.host": "0.0.0.0"}


class RayChild(ChildProcess):
    """A process of a node, as Ray holds it."""

    def locate(self) -> str:
        """Return the node's address."""
        import ray

        return str(ray.util.get_node_ip_address())

    def start_in(self, arguments: Sequence[str], environment: Mapping[str, str], folder: str) -> str:
        """Start it in the folder of the command, or in that of a Ray job; return why that cannot be, if so."""
        import ray

        here = os.path.isdir(folder)
        if not here and not ray.get_runtime_context().runtime_env.get("working_dir"):
            return (
                f"there is no folder {folder} on the node {self.locate()}: start the run in one that all nodes have, "
                "or by ray job submit --working-dir"
            )
        return self.start(arguments, environment, folder if here else None)


class RayProcess:
    """A process of a run as a task of a cluster."""

    def __init__(self, name: str, ray: Any, group: Any, index: int, bundle: Mapping[str, float], folder: str) -> None:
        self.name, self._ray, self._folder, self._task = name, ray, folder, None
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._options = {
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "max_concurrency": CALLS,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        }

    async def locate(self) -> str:
        return str(await self._call("locate"))

    async def reserve_port(self) -> int:
        return int(await self._call("reserve_port"))

    async def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        if problem := await self._call("start_in", list(arguments), dict(environment), self._folder):
            raise UserError(f"--launcher ray: {self.name} cannot be started: {problem}")

    async def follow(self, write: Write) -> int:
        return await follow_polls(partial(self._call, "poll"), write)

    async def send_signal(self, number: int) -> None:
        if self._task is not None:
            await self._call("send_signal", int(number))

    async def kill(self) -> None:
        task = self._task
        if task is None:
            return
        with anyio.move_on_after(KILL_S):
            await self._call("kill")
            return
        self._task = None  # it hangs, or has no node yet
        await to_thread.run_sync(self._ray.kill, task)

    async def _call(self, method: str, *arguments: object) -> Any:
        """Call a method of the task, which is begun by the first one, and again after it was lost."""
        if self._task is None:
            self._task = self._ray.remote(RayChild).options(**self._options).remote()
        task = self._task
        try:
            return await getattr(task, method).remote(*arguments)
        except _list_losses(self._ray) as error:
            self._task = None if self._task is task else self._task
            raise MachineLost(_describe_loss(error)) from None


def _list_losses(ray: Any) -> tuple[type[Exception], ...]:
    """List the errors of Ray by which a task has no node any more."""
    errors = ray.exceptions
    return errors.RayActorError, errors.ActorUnschedulableError, errors.ActorPlacementGroupRemoved


def _describe_loss(error: Exception) -> str:
    """Return the last line of what Ray says, which has the reason."""
    *_, last = str(error).strip().splitlines() or [type(error).__name__]
    return last[:200]


@asynccontextmanager
async def place_on_ray(plan: RunPlan, say: Say) -> AsyncIterator[Placement]:
    """Find places on the cluster at ``$RAY_ADDRESS``, or on the one that this machine is a node of.

    Raises:
        UserError: Ray is not installed, there is no cluster, or no room in it.
    """
    check_package("--launcher ray", "ray", "ray")
    ray = await to_thread.run_sync(partial(ray_tasks.connect_cluster, "--launcher ray"))
    if plan.given.get("players.launcher", "ray") != "ray":
        plan = replace(plan, players=0)  # those have places of their own
    has_gpu = ray.cluster_resources().get("GPU", 0) > 0
    if not has_gpu and not plan.require_gpus:
        say(
            "--launcher ray: no node has a GPU, so the run asks for none (--require_gpus, where an autoscaler has some)"
        )
    bundles = _describe_bundles(plan, has_gpu=has_gpu or plan.require_gpus)
    group = await _reserve(ray, plan, bundles, say)
    try:
        processes = [
            RayProcess(name, ray, group, index, bundle, plan.folder)
            for index, (name, bundle) in enumerate(zip(plan.list_names(), bundles, strict=True))
        ]
        environment = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        if plan.players:
            environment[KEY_ENV] = choose_key(KEY_ENV)
        try:
            yield Placement(processes, _choose_player_arguments(plan), environment, spans_machines=True)
        finally:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as tasks:
                    for process in processes:
                        tasks.start_soon(_end, process)
    finally:
        with suppress(Exception):  # of a cluster that is gone
            ray.util.remove_placement_group(group)


async def _end(process: RayProcess) -> None:
    with suppress(Exception):  # of a machine, or a cluster, that is gone
        await process.kill()


def _choose_player_arguments(plan: RunPlan) -> tuple[str, ...]:
    """Choose how the run starts its players, and where they join, but for what the user has chosen."""
    chosen = {name: value for name, value in _PLAYERS.items() if plan.players and name not in plan.given}
    return tuple(word for name, value in chosen.items() for word in (f"--{name}", value))


def _describe_bundles(plan: RunPlan, *, has_gpu: bool) -> list[dict[str, float]]:
    """Describe what each process takes of a node."""
    gpus = plan.list_gpus() if has_gpu else [0] * len(plan.list_gpus())
    return [{"CPU": plan.cpus, **({"GPU": float(own)} if own else {})} for own in gpus]


async def _reserve(ray: Any, plan: RunPlan, bundles: Sequence[Mapping[str, float]], say: Say) -> Any:
    """Reserve the room of all ranks and servers, beside which the players have theirs.

    Raises:
        UserError: there is none for ``plan.wait_s``.
    """
    from ray.util.placement_group import placement_group

    players = plan.players * ray_tasks.count_cpus()
    asked = {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU")}
    free = ray.available_resources()
    if any(free.get(kind, 0.0) < need + players * (kind == "CPU") for kind, need in asked.items()):
        say(f"--launcher ray: {_describe_room(ray)}; waiting for room, up to {plan.wait_s:g} s")
    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK", name="")
    deadline = anyio.current_time() + plan.wait_s
    ready = False
    try:
        while not (ready := ready or await to_thread.run_sync(partial(group.wait, 1))) or (
            ray.available_resources().get("CPU", 0.0) < players
        ):
            if anyio.current_time() > deadline:
                beside = f", and {players:g} CPUs for {plan.players} players" if plan.players else ""
                raise refuse_room("ray", f"{_describe_bundle_counts(bundles)}{beside}", _describe_room(ray))
            await anyio.sleep(0.2)
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    return group


def _describe_bundle_counts(bundles: Sequence[Mapping[str, float]]) -> str:
    """Describe bundles such as ``2 x (1 CPU, 1 GPU), 1 x (1 CPU, 4 GPU)``."""
    named = [", ".join(f"{number:g} {kind}" for kind, number in bundle.items()) for bundle in bundles]
    return ", ".join(f"{named.count(name)} x ({name})" for name in dict.fromkeys(named))


def _describe_room(ray: Any) -> str:
    """Describe what the cluster has, and what of it is free."""
    total, free = ray.cluster_resources(), ray.available_resources()
    kinds = [kind for kind in ("CPU", "GPU") if total.get(kind)] or ["CPU"]
    parts = (f"{free.get(kind, 0.0):g} of {total.get(kind, 0.0):g} {kind}" for kind in kinds)
    nodes = sum(node["Alive"] for node in ray.nodes())
    return f"{' and '.join(parts)} free on {nodes} nodes"
