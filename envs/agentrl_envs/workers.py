"""Processes beside the run's own: for what computes long, cannot be interrupted, or throws the global dice."""

import sys
from collections.abc import Callable
from typing import TypeVar

from anyio import BrokenWorkerProcess, to_process

from agentrl import ContractError, UserError

T = TypeVar("T")


async def in_worker(function: Callable[..., T], *arguments: object) -> T:
    """Call a function of a module in another process, which ends when the caller is cancelled.

    Raises:
        ContractError: that process, which imports the script that was started, would begin everything again.
    """
    if sys.modules.get("__main__") is None:  # so it is while a worker imports the script
        raise ContractError(
            "a worker's process imports this script, which would begin again there: put what it runs under "
            "`if __name__ == '__main__':`"
        )
    try:
        return await to_process.run_sync(function, *arguments, cancellable=True)
    except BrokenWorkerProcess as broken:
        if isinstance(broken.__cause__, UserError):
            raise broken.__cause__ from None
        raise
