from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test loads from it; to ask where there is none takes minutes


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
