"""The activity of each server, as the run's own requests and those of players tell it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.engines.vllm.server_activity import list_servers


def replica(url: str, requests: int = 0, *, up: bool = True, updating: bool = False) -> Any:
    return SimpleNamespace(url=url, requests=requests, up=up, updating=updating)


@pytest.mark.parametrize(
    ("server", "others", "at"),
    [
        (replica("http://a", 3), 4, ("turns", 7)),
        (replica("http://a"), 0, ("no turn", 1)),
        (replica("http://a", 3, updating=True), 0, ("new weights", 1)),
        (replica("http://a", up=False), 9, ("lost", 1)),
    ],
)
def test_a_server_is_at_turns_or_takes_weights_or_is_lost(server: Any, others: int, at: tuple[str, int]) -> None:
    (listed,) = list_servers([server], [others])
    assert (listed.kind, listed.name) == ("server", "http://a")
    assert {what: doing.number for what, doing in listed.doing.items()} == dict([at])


def test_players_that_tell_of_fewer_servers_count_for_those() -> None:
    listed = list_servers([replica("http://a", 1), replica("http://b", 2)], [5])
    assert [server.doing["turns"].number for server in listed] == [6, 2]
    assert len(list_servers([replica("http://a")], [1, 2, 3])) == 1
