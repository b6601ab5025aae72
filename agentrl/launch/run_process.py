"""A process of a run, at a place that a launcher chose; and the plan that a launcher follows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.errors import UserError

Say = Callable[[str], None]  # takes a sentence for whoever looks at the run
Write = Callable[[str, bytes], None]  # of a stream, "out" or "err", and what a process wrote there


class MachineLost(Exception):
    """The machine of a process is gone, or it has none any more; the sentence says why."""


class RunProcess(Protocol):
    """A process of a run, one after the other at a place: it may be started again when it has ended.

    Every method raises `MachineLost` where the place is gone; `locate` takes another one then.
    """

    name: str  # that sentences call it by, such as "rank 1"

    async def locate(self) -> str:
        """Return the address of its machine, as the others reach it. Waits for one."""
        ...

    async def reserve_port(self) -> int:
        """Return a port of its machine that nothing listens on."""
        ...

    async def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start ``python -m agentrl ARGUMENTS`` there. Raises UserError: that cannot be."""
        ...

    async def follow(self, write: Write) -> int:
        """Hand on what it writes until it ends; return its exit status, -n after signal n."""
        ...

    async def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        ...

    async def kill(self) -> None:
        """End it at once, with all that it has started."""
        ...


@dataclass(frozen=True)
class RunPlan:
    """The processes of a run, for which a launcher finds places.

    Args:
        arguments: of ``agentrl``, as each rank runs it: ``train ...``.
        serve_arguments: the same of each server: ``serve ...``.
        ranks: processes of the learner; the first one rolls out.
        servers: vLLM servers.
        players: that the first rank starts, beside all these.
        cpus: of a machine, for each rank and each server.
        server_gpus: of each server, where the machines have any; a rank has one.
        max_restarts: how often the ranks are started again.
        wait_s: how long to wait for room.
        folder: that the command was given in.
        require_gpus: ask for GPUs also where no machine has one yet.
        options: of the launcher, as they are typed, for the sentence that says how the run resumes.
        given: settings of the run that the user gave, by their dotted names: a launcher leaves these as they are.
    """

    arguments: tuple[str, ...]
    serve_arguments: tuple[str, ...] = ()
    ranks: int = 1
    servers: int = 0
    players: int = 0
    cpus: float = 1.0
    server_gpus: int = 1
    max_restarts: int = 3
    wait_s: float = 60.0
    folder: str = "."
    require_gpus: bool = False
    options: tuple[str, ...] = ()
    given: Mapping[str, object] = field(default_factory=dict)

    def list_names(self) -> list[str]:
        """List what every process is called: ranks first, then servers."""
        return [f"rank {n}" for n in range(self.ranks)] + [f"server {n + 1}" for n in range(self.servers)]

    def list_gpus(self) -> list[int]:
        """List the GPUs that each process takes where there are any, in the same order."""
        return [1] * self.ranks + [self.server_gpus] * self.servers


@dataclass(frozen=True)
class Placement:
    """The places that a launcher found.

    Args:
        processes: in the order of `RunPlan.list_names`.
        arguments: more arguments for each rank, such as how it starts players there.
        environment: variables that ranks and servers need beside their machine's own.
        spans_machines: whether other machines are among the places, so that servers listen for those too.
    """

    processes: Sequence[RunProcess]
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    spans_machines: bool = False


async def follow_polls(poll: Callable[[], Awaitable[tuple[bytes, bytes, int | None]]], write: Write) -> int:
    """Hand on what polls return, of stdout and of stderr, until one has an exit status; return that."""
    while True:
        out, err, status = await poll()
        write("out", out)
        write("err", err)
        if status is not None:
            return status


async def follow_lines(process: RunProcess, write: Write) -> int:
    """Follow a process as `RunProcess.follow` does, and end its last line where it has not."""
    last = {"out": b"\n", "err": b"\n"}

    def pass_on(stream: str, data: bytes) -> None:
        last[stream] = data[-1:] or last[stream]
        write(stream, data)

    try:
        return await process.follow(pass_on)
    finally:
        for stream, end in last.items():
            if end not in (b"\n", b"\r"):
                write(stream, b"\n")


def refuse_room(launcher: str, asked: str, there: str) -> UserError:
    """Make the error of a run that has no room."""
    return UserError(
        f"--launcher {launcher}: the run asks for {asked}, and there is {there}: give fewer --ranks, --servers or "
        "--players, less --cpus each, or more machines"
    )
