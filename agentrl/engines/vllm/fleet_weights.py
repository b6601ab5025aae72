"""The weights of a fleet of servers that are all sent them at once, in one group.

Who is gone is left out, with a sentence, and a group of the rest is sent them again; who is back is in the next group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio

from agentrl.engines.vllm.group_sender import GRACE_S, GroupBroken, GroupSender, Member
from agentrl.engines.vllm.rendezvous import Rendezvous
from agentrl.engines.vllm.server_client import SHUTDOWN_S, Replica, ServerLost
from agentrl.engines.vllm.weight_client import SyncDeadline
from agentrl.engines.vllm.weight_group import GroupOver
from agentrl.engines.vllm.weight_sender import PolicyWeights
from agentrl.runtime.threads import DeadlineExceeded, run_in_thread, with_deadline


class _Again(Exception):
    """Some servers were lost: the rest are to be sent the weights by another group."""


class FleetWeights:
    """The sender of a policy's weights to all servers of a fleet.

    Args:
        backend: ``nccl``, or its twin ``gloo``.
        deadline: of a stage.
        rendezvous: where the workers meet the trainer.
    """

    def __init__(self, weights: PolicyWeights, backend: str, deadline: SyncDeadline, rendezvous: Rendezvous) -> None:
        self._weights, self._backend = weights, backend
        self._deadline, self._rendezvous = deadline, rendezvous
        self._members: list[Replica] = []
        self._sender: GroupSender | None = None

    async def update(self, replicas: Sequence[Replica], version: int, update: str) -> None:
        """Send the weights to these servers; those that are lost meanwhile are down afterwards.

        Raises:
            UserError: a server was started for another kind of training.
        """
        try:
            await self._update(list(replicas), version, update)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._close_group()
            raise
        finally:
            for replica in replicas:
                replica.updating = False

    async def _update(self, left: list[Replica], version: int, update: str) -> None:
        refused = False
        while left:
            for replica in left:
                replica.updating = True  # also while it meets the others: it may give no sign of life
            try:
                left = await self._regroup(left)
                await self._send(left, version, update)
            except GroupBroken as broken:
                await self._close_group()
                members, left = left, await self._find_survivors(left, broken, again=refused)
                refused = refused or len(left) == len(members)
            except _Again:
                await self._close_group()
                left = [r for r in left if not r.is_lost]
            else:
                return

    async def close(self) -> None:
        """Leave the group."""
        await self._close_group()

    async def _regroup(self, replicas: list[Replica]) -> list[Replica]:
        """Make a group of these servers, if it is not there already; return those that are in it."""
        if self._sender is not None and replicas == self._members and not any(r.is_lost for r in replicas):
            return replicas
        await self._close_group()
        clients = await _keep_found(replicas, self._prepare)
        members = list(clients)
        if not members:
            return []
        sender = GroupSender(self._backend, list(clients.values()), self._weights, self._deadline)
        self._members, self._sender = members, sender
        replicas[:] = members  # what is broken below is of these
        with self._rendezvous.reserve(members[0].base_url) as (address, port):
            await self._in_thread(sender, lambda: sender.connect(address, port), 2 * self._deadline.connect_s)
        return members

    async def _prepare(self, replica: Replica) -> Member:
        client = await replica.prepare(2 * GRACE_S)
        copies, workers = await replica.count_workers()
        return Member(client, copies * workers)

    async def _send(self, members: Sequence[Replica], version: int, update: str) -> None:
        """Pause all, send, let all go on.

        Raises:
            GroupBroken: a stage failed at some of them.
            _Again: some are lost outside of it.
        """
        if not members:
            return
        sender = self._sender
        assert sender is not None
        async with AsyncExitStack() as paused:
            try:
                for replica in members:
                    await paused.enter_async_context(replica.pause(update))
            except ServerLost:
                raise _Again from None
            await self._in_thread(sender, sender.send_weights, 4 * self._deadline.stage_s)
            results = await asyncio.gather(*(r.resume(version) for r in members), return_exceptions=True)
        for replica, result in zip(members, results, strict=True):
            if isinstance(result, BaseException) and not isinstance(result, ServerLost):
                raise result
            if result is None:
                replica.up = True
        if any(results):
            await self._close_group()  # nobody waits in it; the next one is of those that are left

    async def _in_thread(self, sender: GroupSender, function: Callable[[], None], seconds: float) -> None:
        """Call the sender in a thread. One that hangs is left behind.

        Raises:
            GroupBroken: a stage failed, or it takes longer than so many seconds.
        """
        task = asyncio.ensure_future(run_in_thread(function))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # marks it as read
        broken = asyncio.wrap_future(sender.client.broken)
        both: set[asyncio.Future[Any]] = {task, broken}
        try:
            await asyncio.wait(both, timeout=seconds, return_when="FIRST_COMPLETED")
            if not task.done() and not broken.done():
                sender.abort(f"not all weights were sent in {seconds:.3g} s")
                await asyncio.wait({broken}, timeout=2 * GRACE_S)
            if broken.done():
                raise broken.result()
            if not task.done():
                late = f"was not given all weights in {seconds:.3g} s"
                raise GroupBroken({}, dict.fromkeys(range(len(self._members)), late))
            task.result()
        except GroupOver as over:
            with suppress(TimeoutError):
                raise await asyncio.wait_for(asyncio.shield(broken), 2 * GRACE_S) from None
            raise GroupBroken(
                {}, dict.fromkeys(range(len(self._members)), f"could not be given weights ({over})")
            ) from None
        finally:
            task.cancel()

    async def _find_survivors(self, members: Sequence[Replica], broken: GroupBroken, *, again: bool) -> list[Replica]:
        """Mark those that are lost, and return the others.

        Those that refused may have done so for one that is gone: they are given another chance, once.
        """
        for number, sentence in broken.lost.items():
            members[number].mark_lost(sentence)
        asked = [number for number in broken.refused if number not in broken.lost]
        alive = await asyncio.gather(*(members[n].is_alive(self._deadline.stage_s) for n in asked))
        for number, lives in zip(asked, alive, strict=True):
            if not lives or (again and not broken.lost):
                members[number].mark_lost(broken.refused[number])
        return [r for r in members if not r.is_lost]

    async def _close_group(self) -> None:
        sender, self._sender, self._members = self._sender, None, []
        await self._weights.abandon()
        if sender is not None:
            with suppress(DeadlineExceeded):  # it holds what a lost server has not let go of
                await with_deadline(SHUTDOWN_S, run_in_thread(sender.shutdown))


async def _keep_found(
    replicas: Sequence[Replica], find: Callable[[Replica], Awaitable[Member]]
) -> dict[Replica, Member]:
    """Find something of each server; leave those out that are lost meanwhile."""
    results = await asyncio.gather(*(find(r) for r in replicas), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, ServerLost):
            raise result
    return {r: m for r, m in zip(replicas, results, strict=True) if isinstance(m, Member)}
