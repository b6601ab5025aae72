from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.browsing import Page, Pages, chromium
from tests.helpers.sites import Site

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test loads from it; to ask where there is none takes minutes
# A busy machine may be ten times slower: no example has a deadline, nor is the drawing of examples timed.
settings.register_profile("any_machine", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")


# A shell's background and nohup ignore two: then no test, and no program that a test starts, would hear them.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


@pytest.fixture(scope="session", autouse=True)
def _own_user_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let agentrl, also in processes that tests start, remember and cache things for the tests alone."""
    for name in ("STATE", "CACHE"):
        os.environ[f"XDG_{name}_HOME"] = str(tmp_path_factory.mktemp(name.lower()))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors: on busy cores a second thread makes a pass twenty times slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def pages(browser: Any) -> Iterator[Pages]:
    """Open pages of a site: ``pages(site, viewport=...)``. Each must have been without a fault when the test ends."""
    opened: list[Page] = []

    def open_page(site: Site, **context: Any) -> Page:
        opened.append(Page(browser, site, **context))
        return opened[-1]

    yield open_page
    for page in opened:
        page.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is long as slow, too."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden", help="a file of TRL's losses for test_trl_parity, or of answers and golds for test_math_answers"
    )
