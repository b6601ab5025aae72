"""Players on other machines: network namespaces, with addresses of their own, one of which is cut off."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_network

import pytest

from tests.helpers.players import open_table, roll_out_here, start_player, without_times

pytestmark = pytest.mark.anyio
BENCHMARKS = ip_network("198.18.0.0/15")  # set aside by RFC 2544: nobody's own


def choose_addresses() -> list[str]:
    """Return three addresses that no other process's test has: what one that was killed left behind is in no way."""
    hosts = 8
    number = os.getpid() % (BENCHMARKS.num_addresses // hosts)
    return [str(BENCHMARKS[hosts * number + host]) for host in (1, 2, 3)]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@dataclass(frozen=True)
class Machine:
    """A network namespace, and the cable to it."""

    name: str

    @property
    def enter(self) -> list[str]:
        """Return the words that start a program there."""
        return ["ip", "netns", "exec", self.name]

    def cut_off(self) -> None:
        """Pull the cable: nothing arrives, and nobody is told."""
        ip("netns", "exec", self.name, "ip", "link", "set", "cable", "down")


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """Make two machines that reach this one at the first address alone."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the program ip")
    bridge, made = f"br{os.getpid()}", [Machine(f"agentrl-{os.getpid()}-{n}") for n in (2, 3)]
    here, *there = choose_addresses()
    ends = [f"v{number}-{os.getpid()}" for number in (2, 3)]
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
            ip("addr", "add", f"{here}/29", "dev", bridge)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network can be made here: {error.stderr.decode(errors='replace').strip()}")
        ip("link", "set", bridge, "up")
        for machine, end, address in zip(made, ends, there, strict=True):
            ip("netns", "add", machine.name)
            ip("link", "add", end, "type", "veth", "peer", "name", "cable", "netns", machine.name)
            ip("link", "set", end, "master", bridge, "up")
            ip("-n", machine.name, "addr", "add", f"{address}/29", "dev", "cable")
            ip("-n", machine.name, "link", "set", "cable", "up")
        yield made
    finally:
        for words in (*(["netns", "del", m.name] for m in made), *(["link", "del", name] for name in (*ends, bridge))):
            with suppress(subprocess.CalledProcessError):
                ip(*words)


async def test_a_machine_that_is_cut_off_loses_its_groups_to_the_other(machines: list[Machine]) -> None:
    async with open_table(host=choose_addresses()[0], timeout_s=3600.0) as table:
        for machine in machines:
            player = start_player(table.controller.url, "--name", machine.name, before=machine.enter)
            table.processes.append(player)
        controller = table.controller
        await table.wait_for(lambda: len(controller.seats) == 2)
        seats = {seat.name: seat for seat in controller.seats.values()}
        playing = asyncio.create_task(table.rollout(seconds=0.05).batch(range(30), 2, seed=3))
        await table.wait_for(lambda: all(controller.book.count_episodes(s.number) for s in seats.values()))
        lost = seats[machines[1].name]

        def lose() -> bool:
            lost.quiet = 7200.0  # as if that were long ago; what had arrived before may still be read
            return lost.number not in controller.seats

        machines[1].cut_off()
        await table.wait_for(lose)
        groups = await playing
        assert [seat.name for seat in controller.seats.values()] == [machines[0].name]
    assert without_times(groups) == without_times(await roll_out_here(list(range(30)), 2, seed=3))
    assert any(f"player {machines[1].name} has been silent for 3600 s, its" in text for text in table.said)
