"""A server on the loopback: a port of its own, and a sentence's worth of error where it is taken."""

import pytest

from agentrl.runtime.loopback_server import listen_on_loopback


def test_a_port_is_free_or_it_is_taken() -> None:
    with listen_on_loopback() as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listen_on_loopback(port)
