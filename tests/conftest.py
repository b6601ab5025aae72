from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test loads from it; to ask where there is none takes minutes
# A busy machine may be ten times slower: no example has a deadline, nor is the drawing of examples timed.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden", help="a file of TRL's losses for test_trl_parity, or of answers and golds for test_math_answers"
    )
