"""Players as processes: killed, stopped, told to end, early and late; a run with players, killed and resumed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.engines.server_keys import find_key_file
from agentrl.errors import ProcessLostError
from agentrl.players.connection import (
    KEY_ENV,
    ConnectionEnded,
    FrameStream,
    KeyRefused,
    accept,
    open_listener,
    start_server,
)
from agentrl.players.launchers import PlayerPlan
from agentrl.players.launchers import subprocess as subprocess_launcher
from agentrl.players.player import play
from tests.helpers.players import BYTES, KEY, open_table, roll_out_here, start_player, without_times

pytestmark = pytest.mark.anyio
TASKS = list(range(40))
ENDED = "was ended by SIGTERM; 0 groups were played"


def find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def test_players_are_killed_stopped_and_told_to_end_and_nothing_is_lost() -> None:
    port = find_free_port()
    early = start_player(f"http://127.0.0.1:{port}", "--name", "early")  # before there is a run
    async with open_table(port=port, timeout_s=3600.0) as table:
        table.processes.append(early)
        others = {name: table.start(name) for name in ("killed", "stopped", "ended")}
        controller = table.controller
        await table.wait_for(lambda: len(controller.seats) == 4)
        seats = {seat.name: seat for seat in controller.seats.values()}
        rollout = table.rollout(seconds=0.05)
        playing = asyncio.create_task(rollout.batch(TASKS, 2, seed=3))
        await table.wait_for(lambda: all(controller.book.count_episodes(s.number) for s in seats.values()))
        others["killed"].send_signal(signal.SIGKILL)
        others["ended"].send_signal(signal.SIGTERM)
        others["stopped"].send_signal(signal.SIGSTOP)
        await table.wait_for(lambda: len(controller.seats) == 2)

        def is_lost() -> bool:
            seats["stopped"].quiet = 7200.0  # as if it had been silent for so long, also where some of it came late
            return len(controller.seats) == 1

        await table.wait_for(is_lost)
        late = table.start("late")
        groups = await playing
        others["stopped"].send_signal(signal.SIGCONT)  # it finds itself lost, and joins again
        await table.wait_for(lambda: "stopped" in {seat.name for seat in controller.seats.values()})
        assert await asyncio.to_thread(others["ended"].wait) == 128 + signal.SIGTERM
    assert without_times(groups) == without_times(await roll_out_here(TASKS, 2, seed=3))
    assert [p.returncode for p in (early, late)] in ([0, 0], [-9, -9], [0, -9], [-9, 0])
    assert not any("Traceback" in text for text in table.said)


@pytest.mark.parametrize("moment", ["hello", "welcome"])
async def test_a_player_that_is_told_to_end_while_it_joins_ends(moment: str) -> None:
    """The signal comes together with the answer that it waits for, or before there is one."""
    seen: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = await accept(reader, writer, KEY)
        assert connection is not None
        await connection.receive()
        player.send_signal(signal.SIGTERM)
        if moment == "welcome":
            engine = {"kind": "forwarded", "capacity": 8, "max_context": 1024}
            connection.send("welcome", name="one", timeout_s=60.0, renderer=BYTES, engine=engine, agent=None)
        with suppress(ConnectionEnded):
            while (frame := await connection.receive()).kind != "leaving":
                pass
            seen.set_result(frame.fields["why"])
        await connection.close()

    listener = open_listener("127.0.0.1", 0)
    server = await start_server(listener, answer)
    async with server:
        player = start_player(f"http://127.0.0.1:{listener.getsockname()[1]}")
        said = (await asyncio.to_thread(player.communicate, timeout=120))[1].decode()
    assert player.returncode == 128 + signal.SIGTERM, said
    assert "ended by SIGTERM; 0 groups were played" in said
    assert not seen.done() or seen.result() == "was ended by SIGTERM"


async def welcome_and_vanish(listener: socket.socket) -> None:
    """Let one player join, and be gone, connection and listener: nobody answers any more."""
    gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = await accept(reader, writer, KEY)
        assert connection is not None
        await connection.receive()
        engine = {"kind": "forwarded", "capacity": 8, "max_context": 1024}
        connection.send("welcome", name="one", timeout_s=60.0, renderer=BYTES, engine=engine, agent=None)
        await connection.drain()
        server.close()
        await connection.close()
        gone.set()

    server = await start_server(listener, answer)
    await gone.wait()


@pytest.mark.parametrize("wait_s", [0.0, 0.2])
async def test_a_player_that_lost_the_run_is_nobodys_mistake(wait_s: float) -> None:
    listener = open_listener("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    sentence = "has not answered for 0.2 s" if wait_s else "closed the connection"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(welcome_and_vanish, listener)
        with pytest.raises(ProcessLostError, match=sentence):
            await play(url, KEY, "one", wait_s, lambda text: None)


async def test_a_player_that_is_told_to_end_while_it_leaves_a_lost_run_does_not_look_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    async def close_late(stream: FrameStream) -> None:
        await close(stream)
        if len(said) == 2:  # the player knows that it lost the run
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)  # the loop takes the signal in

    close = FrameStream.close
    monkeypatch.setattr(FrameStream, "close", close_late)
    listener = open_listener("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(welcome_and_vanish, listener)
        assert await play(url, KEY, "one", 60.0, said.append) == signal.SIGTERM
    assert said == [f"player one has joined {url}", f"{url} closed the connection", ENDED]


@pytest.mark.parametrize(("lost", "status"), [(True, 75), (False, 128 + signal.SIGTERM)])
async def test_one_of_the_run_s_own_that_is_lost_or_told_to_end_is_started_again(lost: bool, status: int) -> None:
    said: list[str] = []
    async with open_table() as table:
        controller = table.controller
        command = (sys.executable, "-m", "agentrl", "player", controller.url, "--wait_s", "0")
        plan = PlayerPlan(1, command, {KEY_ENV: KEY}, controller.url, said.append, controller.fail)
        async with subprocess_launcher(plan):
            await table.wait_for(lambda: controller.seats)
            (seat,) = controller.seats.values()
            if lost:
                seat.connection.abort()  # as one that was silent, though it lives
            else:
                os.kill(int(seat.name.rpartition("-")[2]), signal.SIGTERM)
            await table.wait_for(lambda: controller.joined == 2 and controller.seats)
            assert len((await table.rollout().group(3, 2)).trajectories) == 2
            await controller.close()
    assert said == [f"player 1 of the run ended with status {status}; another one is started"]


@pytest.mark.parametrize(
    ("words", "key", "sentence"),
    [
        (["http://127.0.0.1:9", "--wait_s", "0"], KEY, "no run answers at http://127.0.0.1:9 for 0 s"),
        (["http://127.0.0.1:9"], "", f"put the run's into the environment variable {KEY_ENV}"),
        (["ftp://127.0.0.1:9"], KEY, "a player is given the controller's address, such as http://HOST:PORT"),
        (["http://127.0.0.1:99999"], "", "such as http://HOST:PORT, not 'http://127.0.0.1:99999': Port out of range"),
        (["http://[::1"], KEY, "such as http://HOST:PORT, not 'http://[::1': Invalid IPv6 URL"),
    ],
)
def test_a_player_that_cannot_join_says_why(words: list[str], key: str, sentence: str) -> None:
    player = start_player(*words, key=key)
    _, said = player.communicate(timeout=120)
    assert player.returncode == 2
    assert sentence in said.decode()


async def test_a_wrong_key_ends_a_player_with_the_way_out() -> None:
    async with open_table() as table:
        player = start_player(table.controller.url, key="another")
        _, said = await asyncio.to_thread(player.communicate)
    assert player.returncode == 2
    assert "wants another key: put the run's into $AGENTRL_PLAYER_KEY" in said.decode()


async def test_a_key_that_is_looked_up_may_be_that_of_the_run_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    async with open_table() as table:
        path = find_key_file(int(table.controller.url.rpartition(":")[2]))
        path.parent.mkdir(parents=True)
        path.write_text("of the run that was killed")
        player = start_player(table.controller.url, "--wait_s", "600", key="")
        table.processes.append(player)
        assert player.stderr is not None
        said = await asyncio.to_thread(player.stderr.readline)
        assert said.decode() == f"agentrl: {table.controller.url} wants another key; trying for 600 s\n"
        path.write_text(KEY)
        await table.wait_for(lambda: table.controller.seats)
        with pytest.raises(KeyRefused, match="wants another key"):
            await play(table.controller.url, lambda: "another", "two", 0.0, table.said.append)


def train(folder: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
    own = ["--deterministic", "true", "--rollout.tasks_per_step", "4", "--rollout.group_size", "4"]
    few = ["--eval.final_tasks", "4", "--steps", "3", "--run.save_every", "1", "--run.dir", str(folder)]
    command = [sys.executable, "-m", "agentrl", "train", "--env", "math-tools", *own, *few, *words]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
def test_a_run_with_players_has_the_bits_of_one_without_also_killed_and_resumed(tmp_path: Path) -> None:
    alone, played, killed = (tmp_path / name for name in ("alone", "played", "killed"))
    for folder, words in ((alone, []), (played, ["--players", "2"])):
        run = train(folder, *words)
        said, _ = run.communicate(timeout=900)
        assert run.returncode == 0, said
    run = train(killed, "--players", "2")
    while not (killed / "checkpoints" / "step-000001").exists() and run.poll() is None:
        pass
    run.kill()
    run.communicate()
    again = subprocess.run(
        [sys.executable, "-m", "agentrl", "train", "--resume", str(killed)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert digest(alone) == digest(played) == digest(killed)
    rows = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in (alone, played)]
    for one, other in zip(*rows, strict=True):
        odd = {name for name in one if one[name] != other.get(name)}
        assert all(any(word in name for word in ("time", "clock/", "wait/", "second", "_s")) for name in odd), odd
