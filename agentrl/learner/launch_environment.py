"""The environment of a process that a launcher started: how many there are, which one this is, where they meet.

torchrun and `accelerate launch` say it in torch's own words. What srun and mpirun say is translated into those, so that
``srun agentrl train ...`` is one training of all its tasks, and not as many trainings.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from typing import NamedTuple

from agentrl.errors import UserError

Environment = MutableMapping[str, str]
PORTS = range(20_000, 50_000)  # where tasks of a Slurm job meet, by its number


class Words(NamedTuple):
    """A launcher's names for the number of processes, this one's, and the same on its machine."""

    launcher: str
    world_size: str
    rank: str
    local_size: str
    local_rank: str


LAUNCHERS = (
    Words("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"),
    Words(
        *("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        *("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ),
)


def adopt_launcher(environment: Environment = os.environ) -> None:
    """Say in torch's words what another launcher has said in its own. What is said in those stays.

    Raises:
        UserError: it does not say where the processes meet.
    """
    if "WORLD_SIZE" in environment:
        return
    words = next((w for w in LAUNCHERS if int(environment.get(w.world_size) or 1) > 1 and w.rank in environment), None)
    if words is None:
        return
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if words.launcher == "srun":
        address = address or read_first_host(environment.get("SLURM_STEP_NODELIST", ""))
        port = port or str(PORTS[int(environment.get("SLURM_JOB_ID", "0")) % len(PORTS)])
    if not address or not port:
        raise UserError(
            f"{words.launcher} started {environment[words.world_size]} processes, and does not say where they meet: "
            "set MASTER_ADDR to the first one's host and MASTER_PORT to a free port there, or use torchrun"
        )
    said = {"WORLD_SIZE": words.world_size, "RANK": words.rank, "LOCAL_RANK": words.local_rank}
    environment.update({own: environment[theirs] for own, theirs in said.items()})
    local = re.match(r"\d+", environment.get(words.local_size, ""))  # of Slurm: 8(x2),4
    environment.update(MASTER_ADDR=address, MASTER_PORT=port, **({"LOCAL_WORLD_SIZE": local[0]} if local else {}))


def read_first_host(nodes: str) -> str:
    """Return the first host of Slurm's list, such as ``gpu[007-010,12],login1``; empty where there is none."""
    first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in first.groups()) if first else ""
