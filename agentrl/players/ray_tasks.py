"""Players as tasks of an existing Ray cluster, which places them by their resources and starts lost ones again.

A task is a player, which joins by the address of the run: what is said between the two is the same as anywhere. Ray is
an extra, loaded where it is asked for.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio

from agentrl.errors import ConfigError, ProcessLostError, UserError
from agentrl.players.connection import KEY_ENV
from agentrl.players.player import choose_name, play
from agentrl.runtime import threads
from agentrl.settings.registry import check_package

if TYPE_CHECKING:
    from agentrl.players.launchers import PlayerPlan

CPUS_ENV = "AGENTRL_PLAYER_CPUS"  # that a player takes of a node; 1 by default
LOOK_S = 1.0
PROBE_S = 30.0  # that the head node of a cluster has to take a connection, and to answer
_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # an empty frame of that kind
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS


def run_player(url: str, key: str, wait_s: float = 60.0) -> tuple[int, str]:
    """Play for a run until it is over; return 0 and "", or the exit status and the sentence of what ended it before.

    It ends with its process, so with its node.

    Raises:
        ProcessLostError: a signal ended it, which is for Ray to try again.
    """
    said: list[str] = []
    try:
        by = asyncio.run(play(url, key, choose_name(), wait_s, said.append))
    except UserError as error:
        return error.exit_status, str(error)
    except Exception:  # that Ray would meet again wherever it tries
        return 1, traceback.format_exc(limit=-4).strip()
    if by:
        raise ProcessLostError(said[-1])
    return 0, ""


@asynccontextmanager
async def run_on_ray(plan: PlayerPlan) -> AsyncIterator[None]:
    """Run players as tasks of the cluster at ``$RAY_ADDRESS``, or of the one that this machine is a node of.

    Raises:
        UserError: Ray is not installed, or there is no cluster.
    """
    check_package("players.launcher ray", "ray", "ray")
    ray, refs = await anyio.to_thread.run_sync(partial(_start, plan))
    async with threads.open_task_group() as tasks:
        tasks.start_soon(_watch, ray, refs, plan)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()
            for ref in refs:
                with suppress(Exception):  # of a cluster that is gone
                    ray.cancel(ref, force=True)


def connect_cluster(setting: str) -> Any:
    """Return the module ray, connected to the cluster at ``$RAY_ADDRESS``, or to the one that this machine is in.

    Args:
        setting: that asks for it, as a sentence names it.

    Raises:
        UserError: there is no cluster.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in address:
        raise UserError(
            f"{setting}: $RAY_ADDRESS is {address}; a cluster's address is that of its head node, such as "
            "10.0.0.5:6379, or auto on one of its nodes"
        )
    if not ray.is_initialized():
        try:
            _probe_address(address, ray.util.get_node_ip_address())
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError) as error:
            where = "here" if address == "auto" else f"at {address}"
            raise UserError(
                f"{setting}: there is no Ray cluster {where} ({error!s:.200}): begin one with ray start --head, or put "
                "its address into $RAY_ADDRESS"
            ) from None
    return ray


def _probe_address(address: str, own_host: str) -> None:
    """Greet what listens at HOST:PORT as a client of gRPC does, which Ray's head node answers.

    Args:
        own_host: that Ray takes this machine for, whichever name of it the address has.

    Raises:
        OSError: nothing listens there, or something else, which Ray itself would try for many minutes.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        return  # Ray has a sentence for it
    hosts = [host.strip("[]")] if host not in ("localhost", "127.0.0.1") else [host, own_host]
    for own in hosts[:-1]:
        with suppress(ConnectionRefusedError), socket.create_connection((own, int(port)), PROBE_S) as connection:
            _greet(connection)
            return
    with socket.create_connection((hosts[-1], int(port)), PROBE_S) as connection:
        _greet(connection)


def _greet(connection: socket.socket) -> None:
    """Exchange the first frames of HTTP/2 (RFC 9113, 3.4). Raises OSError: the other side does not."""
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    connection.sendall(_GREETING)
    answer = b""
    with suppress(TimeoutError, ConnectionError):
        while len(answer) < len(_SETTINGS) and (part := connection.recv(len(_SETTINGS) - len(answer))):
            answer += part
    if answer[3:4] != _SETTINGS[3:4]:
        raise OSError("what listens there does not speak gRPC")


def count_cpus() -> float:
    """Count the CPUs of a node that a player takes. Raises ConfigError: the variable is no such number."""
    text = os.environ.get(CPUS_ENV) or "1"
    try:
        count = float(text)
    except ValueError:
        count = math.nan
    if not 0 <= count < math.inf:
        raise ConfigError(f"${CPUS_ENV} is {text!r}; it is the number of CPUs of a node that a player takes, such as 1")
    return count


def _start(plan: PlayerPlan) -> tuple[Any, list[Any]]:
    ray = connect_cluster("players.launcher ray")
    options: dict[str, Any] = {"num_cpus": count_cpus(), "max_retries": -1, "retry_exceptions": [ProcessLostError]}
    remote = ray.remote(run_player).options(**options, scheduling_strategy="SPREAD")
    url, key = _find_reachable(plan.url, ray), plan.environment[KEY_ENV]
    return ray, [remote.remote(url, key) for _ in range(plan.count)]


def _find_reachable(url: str, ray: Any) -> str:
    """Return an address that other nodes reach, where the run listens at all of its machine's."""
    parts = urlsplit(url)
    if parts.hostname not in ("0.0.0.0", "::"):
        return url
    return f"{parts.scheme}://{ray.util.get_node_ip_address()}:{parts.port}"


async def _watch(ray: Any, refs: Sequence[Any], plan: PlayerPlan) -> None:
    """End the run where a player cannot play, or is lost for good."""
    left = list(refs)
    while left:
        done, left = await anyio.to_thread.run_sync(partial(ray.wait, left, timeout=LOOK_S), abandon_on_cancel=True)
        for ref in done:
            try:
                status, problem = await anyio.to_thread.run_sync(partial(ray.get, ref))
            except Exception as error:  # Ray's own, of many kinds; with a cause where a node cannot import this
                cause = getattr(error, "cause", None)
                lost = f"Ray gave it up ({type(error).__name__}: {error!s:.200})"
                status, problem = ProcessLostError.exit_status, lost
                if cause is not None and not isinstance(cause, ProcessLostError):
                    status, problem = 1, f"{type(cause).__name__}: {cause}"
            if status == ProcessLostError.exit_status:
                plan.fail(ProcessLostError(f"a player on Ray is lost: {problem}"))
            elif status:
                what = "cannot start" if status == UserError.exit_status else "failed"
                plan.fail(UserError(f"a player on Ray {what}: {problem}"))
