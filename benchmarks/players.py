"""Players: what they add, what they cost their controller, and what a storm of them loses.

    python benchmarks/players.py speed               # turns a second: in one process, with one player, with two
    python benchmarks/players.py controller          # CPU of the controller's process a group, at 16,384 tokens; memory
    python benchmarks/players.py concurrent          # 10,000 episodes at once on two players, one of them killed
    python benchmarks/players.py storm [EPISODES]    # players killed and joining at random: the bits of one process

The engine is scripted and in the players, so that nothing but the framework is measured. Players are processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from agentrl import Env, EnvSpec, Reply, Step, Trajectory
from agentrl.players.connection import KEY_ENV, open_listener
from agentrl.players.controller import Controller, open_controller
from agentrl.players.group_bytes import pack_group
from agentrl.players.leased_rollout import LeasedRollout
from agentrl.players.recipe import Recipe
from agentrl.rollout.rollout import Rollout
from agentrl.testing import STOP, ByteRenderer, ScriptedEngine
from agentrl.types import Completion, Group, Observation, SamplingParams, Segment, Stop

ROOT = Path(__file__).parent.parent
FILE = "benchmarks/players.py"
KEY = "a-key-of-the-benchmark"


class Turns(Env):
    """So many turns of so many characters; the reward is of the task and of what was said."""

    def __init__(self, turns: int = 2, characters: int = 20, seconds: float = 0.0) -> None:
        self.turns, self.characters, self.seconds = turns, characters, seconds
        self.max_turns = turns

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self.task = seed
        return f"task {seed}", {}

    async def step(self, action: Reply) -> Step:
        await anyio.sleep(self.seconds)
        return Step("x" * self.characters, 0.0, False, False, {})

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        return {"parity": float(self.task % 2)}


class SeedEngine(ScriptedEngine):
    """Says what the turn's seed makes, whoever asks, and keeps nothing."""

    def __init__(self, capacity: int = 256) -> None:
        super().__init__([""])
        self.capacity = capacity

    async def generate(self, token_ids: Sequence[int], params: SamplingParams, *, session: str) -> Any:
        await asyncio.sleep(0)
        ids = (*f"turn {params.seed % 1000}".encode(), STOP)
        return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), "stop")

    def end_session(self, session: str) -> None: ...


@asynccontextmanager
async def open_table(capacity: int, **options: Any) -> AsyncIterator[Controller]:
    described = {"kind": "import", "import": f"{FILE}:SeedEngine", "arguments": {"capacity": capacity}}
    fields = {"renderer": {"import": "agentrl.testing:ByteRenderer"}, "engine": described}
    controller = Controller(Recipe(fields, ByteRenderer()), None, capacity, KEY, **options)
    async with open_controller(controller, open_listener("127.0.0.1", 0)):
        yield controller


def start_player(controller: Controller) -> subprocess.Popen[bytes]:
    environment = {**os.environ, KEY_ENV: KEY, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "agentrl", "player", controller.url, "--wait_s", "0"]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)


def end(players: Sequence[subprocess.Popen[bytes]]) -> None:
    for player in players:
        player.kill()
        player.wait()


def make_rollout(controller: Controller, **env: Any) -> LeasedRollout:
    rollout = LeasedRollout(EnvSpec(f"{FILE}:Turns", **env), SeedEngine(), ByteRenderer())
    rollout.controller = controller
    return rollout


async def wait_for(controller: Controller, count: int) -> None:
    while len(controller.seats) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def measure_speed(groups: int = 250, size: int = 8, turns: int = 5, rounds: int = 3) -> None:
    """Turns a second: in this process, then with players, in turn; the best round of each counts."""
    rates: dict[int, list[float]] = {0: [], 1: [], 2: []}
    each: dict[int, list[float]] = {1: [], 2: []}  # turns a CPU-second of a player
    here = Rollout(EnvSpec(f"{FILE}:Turns", turns=turns), SeedEngine(), ByteRenderer())
    for _ in range(rounds):
        for players, found in rates.items():
            async with open_table(256) as controller:
                started = [start_player(controller) for _ in range(players)]
                await wait_for(controller, players)
                rollout: Rollout = make_rollout(controller, turns=turns) if players else here
                await rollout.batch(range(8), size)  # everything is imported
                begun, cpu, theirs = time.perf_counter(), cpu_s(), sum(map(child_cpu_s, started))
                await rollout.batch(range(groups), size, seed=1)
                seconds, cpu = time.perf_counter() - begun, cpu_s() - cpu
                found.append(groups * size * turns / seconds)
                if players:
                    each[players].append(groups * size * turns / (sum(map(child_cpu_s, started)) - theirs))
                note = f", the controller {cpu / groups * 1000:.2f} ms a group" if players else ""
                print(
                    f"{players or 'no'} players: {found[-1]:,.0f} turns/s{note}; load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
                end(started)
    best = {players: max(found) for players, found in rates.items()}
    print(
        f"in one process {best[0]:,.0f} turns/s, 1 player {best[1]:,.0f}, 2 players {best[2]:,.0f}: "
        f"{best[2] / best[1]:.2f} of one"
    )
    print(f"turns a CPU-second of a player: {max(each[1]):,.0f} of one alone, {max(each[2]):,.0f} of two")


def child_cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure_controller(groups: int = 2_000, tokens: int = 16_384, size: int = 8) -> None:
    """CPU of the controller a group: a player by hand sends a group that is packed already, and it is not looked at."""
    import agentrl
    from agentrl.players.connection import connect
    from agentrl.players.controller import WIRE

    each = tokens // size // 2
    segments = (
        Segment("prompt", tuple(range(each))),
        Segment("model", tuple(range(each)), (-0.5,) * each, (3,) * each),
    )
    message: Any = {"role": "user", "content": "x" * each}
    one = Trajectory(1, segments, (message,) * 4, Stop.TERMINATED, {"r": 1.0}, {}, (0.0,) * 5)
    header, body = pack_group(Group(1, (one,) * size))
    packed = b"".join(body)
    async with open_table(1 << 20) as controller:
        stream = await connect(controller.url, KEY)
        version = {"wire": WIRE, "agentrl": agentrl.__version__, "python": list(sys.version_info[:2])}
        stream.send("hello", name="by hand", **version)
        news = {
            "turns": 40,
            "engine_s": 1.0,
            "other_s": 1.0,
            "rollouts": [[0, {"turns": 40, "tokens": 9}]],
            "ended": [],
        }

        spent = 0.0  # by the player by hand, in this process too

        async def answer() -> None:
            nonlocal spent
            left = groups
            while left:
                frame = await stream.receive()
                if frame.kind == "lease":
                    begun = time.thread_time()
                    stream.send("group", (packed,), lease=frame.fields["lease"], **header, **news)
                    spent += time.thread_time() - begun
                    await stream.drain()
                    left -= 1

        rollout = make_rollout(controller)
        number = rollout._find_terms()
        answering = asyncio.create_task(answer())
        fields, before = {"task": 1, "size": size, "seed": 1, "first": 0}, resident_mib()
        begun, memory = time.thread_time(), []
        for _part in range(10):
            for _ in range(groups // 10):
                await controller.roll_out(number, size, fields)
            memory.append(resident_mib())
        cpu = time.thread_time() - begun - spent
        await answering
        stream.abort()
    print(
        f"{cpu / groups * 1000:.3f} ms of CPU a group of {tokens:,} tokens ({len(packed) / 1024:.0f} KiB), both ends "
        f"of the wire in it; memory {before:.0f} MiB before, then {memory[0]:.0f} to {memory[-1]:.0f} MiB"
    )


async def measure_concurrent(episodes: int = 10_000, size: int = 8) -> None:
    """So many episodes in play at once on two players, one killed in the middle."""
    async with open_table(episodes) as controller:
        players = [start_player(controller) for _ in range(2)]
        await wait_for(controller, 2)
        rollout = make_rollout(controller, turns=3, seconds=4.0)
        begun = time.perf_counter()
        playing = asyncio.create_task(rollout.batch(range(episodes // size), size, seed=1))
        most = 0
        while controller.turns < episodes and not playing.done():
            await asyncio.sleep(0.05)
            most = max(most, sum(controller.book.count_episodes(n) for n in controller.seats))
        players[0].send_signal(signal.SIGKILL)
        groups = await playing
        seconds = time.perf_counter() - begun
        end(players)
    assert [g.task for g in groups] == list(range(episodes // size))
    assert all(len(g.trajectories) == size for g in groups)
    print(f"{most:,} episodes in play on two players, one killed: {episodes:,} came back in {seconds:.0f} s, each once")


def digest(groups: Sequence[Group]) -> str:
    """Digest everything of groups but the clock."""
    digested = hashlib.sha256()
    for group in groups:
        header, body = pack_group(Group(group.task, tuple(replace(t, timings={}) for t in group)))
        digested.update(repr(header).encode())
        for part in body:
            digested.update(part)
    return digested.hexdigest()


async def measure_storm(episodes: int, size: int = 8, seed: int = 1) -> None:
    """So many episodes while players are killed, stopped and join at random: the bits of one process, each once."""
    rng, groups, chunk = random.Random(seed), episodes // size, 1_000
    here = Rollout(EnvSpec(f"{FILE}:Turns"), SeedEngine(), ByteRenderer())
    lost = killed = joined = 0
    said: list[str] = []
    begun = time.perf_counter()
    async with open_table(256, on_message=said.append, timeout_s=5.0) as controller:
        players: list[subprocess.Popen[bytes]] = []

        async def storm() -> None:
            nonlocal killed, joined
            while True:
                while len(players) < rng.randint(1, 3):
                    players.append(start_player(controller))
                    joined += 1
                await asyncio.sleep(rng.uniform(0.5, 4.0))
                if len(controller.seats) > 0 and players:
                    player = players.pop(rng.randrange(len(players)))
                    player.send_signal(rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP]))
                    killed += 1
                    players_gone.append(player)

        players_gone: list[subprocess.Popen[bytes]] = []
        storming = asyncio.create_task(storm())
        rollout = make_rollout(controller)
        for first in range(0, groups, chunk):
            tasks = range(first, min(first + chunk, groups))
            played = await rollout.batch(tasks, size, seed=seed)
            if digest(played) != digest(await here.batch(tasks, size, seed=seed)):
                lost += 1
            memory = resident_mib()
            print(f"{tasks.stop * size:,} episodes, {killed} players gone, {memory:.0f} MiB", flush=True)
        storming.cancel()
        dropped, left = controller.book.dropped, len(controller.book.leases)
        for player in (*players, *players_gone):
            player.send_signal(signal.SIGCONT)
        end([*players, *players_gone])
    assert not lost, f"{lost} chunks differ from one process"
    assert not left
    print(
        f"{groups * size:,} episodes, each group once, with the bits of one process; {joined} players joined, {killed} "
        f"were killed, stopped or ended; {dropped} second answers dropped; {time.perf_counter() - begun:.0f} s"
    )


def main() -> None:
    os.chdir(ROOT)
    what, *rest = sys.argv[1:] or ["speed"]
    if what == "storm":
        asyncio.run(measure_storm(int(rest[0]) if rest else int(os.environ.get("AGENTRL_EPISODES", "100000"))))
    else:
        measure = {"speed": measure_speed, "controller": measure_controller, "concurrent": measure_concurrent}[what]
        asyncio.run(measure())


if __name__ == "__main__":
    main()
