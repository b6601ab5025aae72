"""The learner's ranks: started together, and all of them again, from the newest checkpoint, where one ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

import anyio

from agentrl.errors import UserError
from agentrl.launch.endings import Ending, compute_exit_status, describe_ending, is_kill, is_mistake
from agentrl.launch.run_process import MachineLost, RunProcess, Say, Write, follow_lines

REASON_S = 15.0  # that the first rank has to say why another one ended
END_S = 20.0  # that it has to end by itself
AGAIN_S = 1.0
FIRST = "rank 0"
RENEWED = (128 + signal.SIGTERM, -signal.SIGTERM)  # ends of the first rank that it was asked for
Relay = Callable[[str], Write]  # of a process, by its name


class RankGroup:
    """The ranks of one run.

    Args:
        processes: the first of them is rank 0; each has the name of its rank, which may be another one after a restart.
        arguments: returns those of ``agentrl`` for every rank, once all servers answer.
        environment: variables beside torch's.
        max_restarts: how often they are started again after one has ended.
        wait_s: how long a place may take to be found again.
        relay: returns what takes the output of a process.
        say: takes a sentence for whoever looks at the run.
    """

    def __init__(
        self,
        processes: Sequence[RunProcess],
        arguments: Callable[[], Awaitable[Sequence[str]]],
        environment: Mapping[str, str],
        *,
        max_restarts: int,
        wait_s: float,
        relay: Relay,
        say: Say,
    ) -> None:
        self._processes, self._arguments, self._environment = tuple(processes), arguments, environment
        self._max_restarts, self._wait_s, self._relay, self._say = max_restarts, wait_s, relay, say
        self._ended_by: signal.Signals | None = None  # the user
        self._ended = asyncio.Event()
        self._started = False  # the first rank, which hears signals
        self._renewed = False  # asked to end by us, to be started with other arguments
        self._outdated = False  # what is prepared for a start
        self._sending: set[asyncio.Task[None]] = set()

    def end(self, number: signal.Signals) -> None:
        """Let the run save and end, as after a signal in the terminal."""
        self._ended_by = number
        self._ended.set()
        if self._started and not self._renewed:  # else it saves already; another signal would end it at once
            self._send(number)

    def renew(self) -> bool:
        """Let the run save and end, and start it again with the arguments as they are then; return True if it runs."""
        if self._ended_by is not None or self._renewed:
            return False
        if not self._started:
            self._outdated = True
            return False
        self._renewed = True
        self._send(signal.SIGTERM)
        return True

    async def run(self) -> int:
        """Run them until the run is over; return its exit status.

        Raises:
            UserError: there is no place for one any more.
        """
        attempt = failures = 0
        while True:
            rank, ending = await self._run_once(attempt)
            if ending == 0 or self._ended_by is not None:
                return compute_exit_status(-self._ended_by if self._ended_by and self._is_renewal(ending) else ending)
            if not self._is_renewal(ending):
                failures += 1
                if not self._may_begin_again(f"rank {rank}", ending, failures):
                    return compute_exit_status(ending)
            attempt += 1

    def _is_renewal(self, ending: Ending) -> bool:
        """Return True for the end that `renew` asked for."""
        return self._renewed and ending in RENEWED

    def _may_begin_again(self, name: str, ending: Ending, failures: int) -> bool:
        """Say how the ranks have ended, and whose end that is; return True if they may begin again."""
        how = describe_ending(ending)
        if is_mistake(ending):
            if name != FIRST:  # that one has told it by itself
                self._say(f"{name} {how}, which is that of the run")
            return False
        if failures > self._max_restarts:
            self._say(f"{name} {how}, after {self._max_restarts} restarts (--max_restarts)")
            return False
        count = f"{failures} of {self._max_restarts} restarts"
        self._say(f"{name} {how}; the learner's processes begin again at the newest checkpoint ({count})")
        return True

    async def _run_once(self, attempt: int) -> tuple[int, Ending]:
        """Start all; return which one ended first, and how, once all have ended."""
        self._started = self._renewed = False
        following: list[asyncio.Task[Ending]] = []
        try:
            prepared = await self._prepare()
            if prepared is None:
                return 0, -int(self._ended_by or signal.SIGINT)
            if (lost := await self._start(*prepared, attempt, following)) is not None:
                return len(following), lost
            return await self._await_end(following)
        finally:
            self._started = False
            with anyio.CancelScope(shield=True):
                await self._clear(following)

    async def _start(
        self,
        arguments: Sequence[str],
        addresses: Sequence[str],
        attempt: int,
        following: list[asyncio.Task[Ending]],
    ) -> MachineLost | None:
        """Start the ranks one after the other, and follow them; return the loss of the machine of the next one."""
        order = sorted(range(len(addresses)), key=lambda n: addresses.index(addresses[n]))  # a machine's are neighbours
        port = 0
        for rank, process in enumerate(self._processes[n] for n in order):
            process.name = f"rank {rank}"
            try:
                port = port or await process.reserve_port()
                torch = describe_rank(rank, [addresses[n] for n in order], port, attempt)
                await process.start(arguments, {**self._environment, **torch})
            except MachineLost as lost:
                return lost
            following.append(asyncio.create_task(_follow(process, self._relay(process.name))))
            if rank == 0:
                self._hear()
        return None

    def _hear(self) -> None:
        """Let the first rank hear signals, and what came while it was started."""
        self._started = True
        if self._ended_by is not None:
            self._send(self._ended_by)
        elif self._outdated:
            self.renew()

    async def _prepare(self) -> tuple[Sequence[str], list[str]] | None:
        """Return the arguments and the addresses for a start, once servers answer; None where the user ends the run."""
        preparing = asyncio.ensure_future(self._find_places())
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({preparing, ended}, return_when=asyncio.FIRST_COMPLETED)
            return None if ended.done() else preparing.result()
        finally:
            preparing.cancel()
            ended.cancel()

    async def _find_places(self) -> tuple[Sequence[str], list[str]]:
        """Return the arguments and the addresses; choose both again where arguments are outdated meanwhile."""
        while True:
            self._outdated = False
            arguments = await self._arguments()
            try:
                with anyio.fail_after(self._wait_s):
                    addresses = [await self._locate(process) for process in self._processes]
            except TimeoutError:
                raise UserError(f"there is no room for the learner's processes again, for {self._wait_s:g} s") from None
            if not self._outdated:
                return arguments, addresses

    async def _await_end(self, following: Sequence[asyncio.Task[Ending]]) -> tuple[int, Ending]:
        """Wait until the first rank ends, or another one fails; return which of those that ended is why, and how."""
        first, left = following[0], set(following)
        while not first.done():
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            if failed := [task for task in done if task.result() != 0 and task is not first]:
                if not any(is_kill(task.result()) for task in failed):  # perhaps of what the first one has just said
                    await asyncio.wait([first], timeout=REASON_S)
                if not first.done():
                    self._send(signal.SIGTERM)
                    await asyncio.wait([first], timeout=END_S)
                    return following.index(failed[0]), failed[0].result()
        if first.result() == 0:
            await asyncio.wait(following, timeout=END_S)
            return 0, 0
        endings = [(rank, task.result()) for rank, task in enumerate(following) if task.done() and task.result() != 0]
        return max(endings, key=lambda one: (is_kill(one[1]), is_mistake(one[1])))

    async def _locate(self, process: RunProcess) -> str:
        """Return the address of a process's machine; of another one where it is gone meanwhile."""
        while True:
            try:
                return await process.locate()
            except MachineLost:
                await anyio.sleep(AGAIN_S)

    async def _clear(self, following: Sequence[asyncio.Task[Ending]]) -> None:
        for process in self._processes:
            with suppress(MachineLost):
                await process.kill()
        if following:
            await asyncio.wait(following, timeout=END_S)
        for task in following:
            task.cancel()

    def _send(self, number: int) -> None:
        """Signal the first rank, which decides when all end."""
        task = asyncio.create_task(_deliver(self._processes[0], number))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


async def _deliver(process: RunProcess, number: int) -> None:
    with suppress(MachineLost):
        await process.send_signal(number)


async def _follow(process: RunProcess, write: Write) -> Ending:
    try:
        return await follow_lines(process, write)
    except MachineLost as lost:
        return lost


def describe_rank(rank: int, addresses: Sequence[str], port: int, attempt: int) -> dict[str, str]:
    """Describe a rank in torchrun's variables: how many there are, which one it is, where they meet.

    Args:
        addresses: of every rank's machine, those of one machine next to each other.
        attempt: how often they were started before.
    """
    here = addresses[rank]
    return {
        "WORLD_SIZE": str(len(addresses)),
        "RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(addresses.count(here)),
        "LOCAL_RANK": str(rank - addresses.index(here)),
        "MASTER_ADDR": addresses[0],
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
