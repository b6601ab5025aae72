"""Loading from the hub, where there is none."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from agentrl.models.hub import explain_load_errors


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[http.server.HTTPServer]:
    """A server that has nothing."""
    server = http.server.HTTPServer(("127.0.0.1", 0), _Nothing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


class _Nothing(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, *values: object) -> None:
        pass


def test_a_hub_that_answers_is_asked(hub: http.server.HTTPServer) -> None:
    with explain_load_errors("x"):
        assert not constants.HF_HUB_OFFLINE


def test_without_one_the_cache_is_read_alone(hub: http.server.HTTPServer) -> None:
    """Each file would be tried for a minute."""
    hub.shutdown()
    hub.server_close()
    with explain_load_errors("x"):
        assert constants.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE


def test_for_a_folder_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with explain_load_errors("x", local=True):
        assert not constants.HF_HUB_OFFLINE
