"""Where weights are handed over between GPUs: an address and ports that the user names, held until vLLM listens."""

import socket

import pytest

from agentrl.engines.vllm.rendezvous import Rendezvous, build_rendezvous
from agentrl.errors import UserError
from agentrl.settings.loader import build_config, read_overrides

URL = "http://127.0.0.1:8000"


def listen_as_vllm_does(address: str, port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((address, port))
    listening.listen()
    return listening


def test_a_port_is_nobody_elses_while_it_is_held_and_vllm_listens_on_it() -> None:
    with Rendezvous().reserve(URL) as (address, port):
        assert address == "127.0.0.1"
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port))
        with listen_as_vllm_does(address, port), socket.create_connection((address, port), 2):
            pass


def test_ports_of_a_range_are_taken_one_after_the_other_and_a_full_one_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        first = taken.getsockname()[1]
        there = build_rendezvous(None, f"{first}-{min(first + 40, 65535)}")
        with there.reserve(URL) as (_, one), there.reserve(URL) as (_, two):
            assert first < one < two
        with (
            pytest.raises(UserError, match=f"engine.port_range {first}-{first} has no free port"),
            build_rendezvous(None, f"{first}-{first}").reserve(URL),
        ):
            pass


def test_an_address_of_another_machine_is_refused() -> None:
    with (
        pytest.raises(UserError, match=r"engine\.master_address 203\.0\.113\.9 is no address of this machine"),
        build_rendezvous("203.0.113.9", None).reserve(URL),
    ):
        pass


@pytest.mark.parametrize("text", ["29699-29600", "0-9", "1-70000", "a-b", "1-2-3"])
def test_what_is_no_range_of_ports_is_refused(text: str) -> None:
    words = ["--env", "shop", "--engine", "server", "--engine.urls", URL, "--engine.port_range", text]
    with pytest.raises(UserError, match="a range of ports is such as 29600-29699"):
        build_config(read_overrides(words))
