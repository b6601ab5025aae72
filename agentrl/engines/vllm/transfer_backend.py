"""The backends by which weights come to vLLM: their names, and which one it is.

    memory     files in memory, or their bytes: agentrl's own, for the CPU
    nccl       one group of the trainer and all workers of all servers, and one broadcast
    nccl_m2n   each rank of a learner in shards sends its own part, to one server after the other
    ipc        vLLM in this process, on this GPU

A server is started for one of them.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

from agentrl.errors import UserError

TransferBackend = Literal["auto", "memory", "nccl", "nccl_m2n", "ipc"]
MEMORY, NCCL, M2N, IPC = "memory", "nccl", "nccl_m2n", "ipc"
GLOO = "gloo"  # the twin of nccl on the CPU, for the tests
GROUPS = (NCCL, GLOO)  # one group for all servers
RECEIVERS = {NCCL: "agentrl_nccl", M2N: "agentrl_nccl_m2n", GLOO: GLOO}  # vLLM's engines with deadlines, as registered
BETWEEN_GPUS = (NCCL, M2N)


def choose_backend(setting: str, url: str, offered: str, *, has_gpu: bool) -> str:
    """Choose how weights go to a server that was started for ``offered``.

    Raises:
        UserError: the setting is another one, or the learner cannot send so.
    """
    if setting == IPC or offered == IPC:
        raise UserError(
            "engine.weight_transfer ipc: a GPU's memory is shared with vLLM in this process alone (--engine vllm); "
            "servers take nccl or nccl_m2n on GPUs, memory on the CPU"
        )
    if setting not in ("auto", offered):
        raise UserError(
            f"engine.weight_transfer {setting}: {url} was started for {offered}; start it with: agentrl serve "
            f"--backend {setting}, or leave the setting out"
        )
    if offered in BETWEEN_GPUS and not has_gpu:
        raise UserError(
            f"{url} takes weights by {offered}, between GPUs, and the learner has none; start it with: agentrl serve "
            "--backend memory"
        )
    return offered


def find_setting_problem(setting: str, *, has_gpu: bool, world_size: int) -> str:
    """Find why a learner cannot send weights by a setting; nothing where it can."""
    if setting in BETWEEN_GPUS and not has_gpu:
        return "it is between GPUs, and torch sees none here; set it to memory"
    if setting == M2N and world_size == 1:
        return "it is for a learner in several processes (torchrun), each of which sends a part; set it to nccl"
    if setting == M2N and not has_m2n():
        return "it needs vLLM 0.32 and NVIDIA's nccl.m2n (nccl-extensions), which are not installed; set it to nccl"
    return ""


def plan_backend(setting: str, *, has_gpu: bool, world_size: int) -> str:
    """Plan which backend the servers of a run are started for.

    Raises:
        UserError: the setting cannot be here.
    """
    if setting == IPC:
        choose_backend(setting, "", IPC, has_gpu=has_gpu)
    if problem := find_setting_problem(setting, has_gpu=has_gpu, world_size=world_size):
        raise UserError(f"engine.weight_transfer {setting}: {problem}")
    if setting != "auto":
        return setting
    if not has_gpu:
        return MEMORY
    return M2N if world_size > 1 and has_m2n() else NCCL


def has_m2n() -> bool:
    """Return True if vLLM has the backend ``nccl_m2n`` here as 0.32 has it, and NVIDIA's library that it needs."""
    try:
        modules = ("vllm.distributed.weight_transfer.m2n_source", "nccl.m2n")  # the source of weights is of 0.32 alone
        return all(importlib.util.find_spec(module) is not None for module in modules)
    except ImportError:
        return False
