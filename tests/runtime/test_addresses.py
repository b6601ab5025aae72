"""Addresses are whole where they are given, or it is said what is wrong with them."""

from __future__ import annotations

import pytest

from agentrl.runtime.addresses import split_address


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://10.0.0.5:7000", "10.0.0.5", 7000),
        ("https://controller.example.org/one", "controller.example.org", None),
        ("http://[::1]:8000", "::1", 8000),
    ],
)
def test_the_parts_of_an_address_can_be_read(url: str, host: str, port: int | None) -> None:
    parts = split_address(url)
    assert (parts.hostname, parts.port) == (host, port)


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("10.0.0.5:7000", "neither http:// nor https://"),
        ("ftp://10.0.0.5", "neither http:// nor https://"),
        ("http://:7000", "names no host"),
        ("http://10.0.0.5:99999", "Port out of range"),
        ("http://10.0.0.5:0", "nobody listens at port 0"),
        ("http://10.0.0.5:port", "'port'"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("http://a..b:7000", "label"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(url: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        split_address(url)
