"""The keys of one attempt in a store that outlives it.

torchrun's store stays where its processes are restarted, and has the addresses at which those before them listened:
whoever reads one waits for a process that is gone. So the processes of an attempt agree on a word that no other attempt
has, and put it before each key.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable

from agentrl.errors import ProcessLostError
from agentrl.learner.roll_call import SharedStore

POLL_S = 0.1


def agree_on_attempt(store: SharedStore, rank: int, world_size: int, timeout_s: float) -> str:
    """Return the word of this attempt, the same one in all of its processes.

    The first process gives a word; another one that reads it greets under it, and takes it once it is greeted back: a
    word of an earlier attempt answers nobody.

    Raises:
        ProcessLostError: a process did not come.
    """
    deadline = time.monotonic() + timeout_s
    own = uuid.uuid4().hex
    if rank:
        return _take_word(store, rank, own, deadline)
    store.set("agentrl/attempt", own)
    for other in range(1, world_size):
        hello = f"agentrl/{own}/{other}"
        _wait(store, [hello], f"rank {other} of the learner's {world_size} processes did not start", deadline)
        store.set(f"{hello}/{store.get(hello).decode()}", "welcome")
    return own


def _take_word(store: SharedStore, rank: int, own: str, deadline: float) -> str:
    greeted: set[str] = set()
    late = f"rank 0 of the learner's processes did not start, and rank {rank} waits for it"
    _wait(store, ["agentrl/attempt"], late, deadline)
    while True:
        word = store.get("agentrl/attempt").decode()
        hello = f"agentrl/{word}/{rank}"
        if word not in greeted:
            greeted.add(word)
            store.set(hello, own)
        if _wait(store, [f"{hello}/{own}"], late, deadline, polls=1):
            return word


def _wait(store: SharedStore, keys: Iterable[str], late: str, deadline: float, polls: int | None = None) -> bool:
    """Wait until a store has keys; return whether it has. Raises ProcessLostError at the deadline."""
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            raise ProcessLostError(late)
        time.sleep(POLL_S)
        if polls is not None and (polls := polls - 1) < 0:
            return False
    return True
