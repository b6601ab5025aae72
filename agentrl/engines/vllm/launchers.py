"""Launchers: what starts the vLLM servers of a run, and ends them with it.

A launcher is an async context manager of a `ServerPlan`: it starts ``plan.count`` servers by ``plan.command``, wherever
it likes, and gives their URLs. Others are siblings of `local`: ``module:function``, ``file.py:function``, or an entry
point of the group ``agentrl.launchers``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, Self

import torch
from anyio import to_thread

from agentrl.engines.vllm.m2n_sender import find_m2n_problem
from agentrl.engines.vllm.rendezvous import ANYWHERE, Rendezvous
from agentrl.engines.vllm.requests import RETURN_FLAG
from agentrl.engines.vllm.server_pool import ServerEngine
from agentrl.engines.vllm.transfer_backend import M2N, NCCL, plan_backend
from agentrl.errors import ContractError, UserError, author_errors
from agentrl.runtime.parent_watch import OWNER
from agentrl.settings.registry import load_registered
from agentrl.settings.schema import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

END_S = 20.0  # that a server has to end by itself


@dataclass(frozen=True)
class ServerPlan:
    """The servers that a run needs.

    Args:
        count: how many.
        command: the words that start one of them; it prints its URL on a line of its own when it answers, and runs
            until it is terminated.
    """

    count: int
    command: tuple[str, ...]


Launcher = Callable[[ServerPlan], AbstractAsyncContextManager[Sequence[str]]]


def plan_transfer(model: PreTrainedModel, setting: str) -> str:
    """Plan which backend the servers of a run are started for.

    Raises:
        UserError: the setting cannot be here.
    """
    world_size, has_gpu = int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.is_available()
    planned = plan_backend(setting, has_gpu=has_gpu, world_size=world_size)
    return NCCL if setting == "auto" and planned == M2N and find_m2n_problem(model, world_size) else planned


def plan_servers(config: TrainConfig, count: int, backend: str | None = None) -> ServerPlan:
    """Plan the servers of a run: `agentrl serve` with its model, as the run loads it, and its limits.

    Args:
        backend: how they are given weights; what `agentrl serve` takes by default.
    """
    e = config.engine
    words = {"--model": config.model, "--dtype": config.dtype, "--max_num_seqs": str(e.max_num_seqs)}
    if backend is not None:
        words["--backend"] = backend
    if e.max_model_len:
        words["--max_model_len"] = str(e.max_model_len)
    if config.lora.rank:
        words["--lora_rank"] = str(config.lora.rank)
    if config.load.revision:
        words["--revision"] = config.load.revision
    if config.load.trust_remote_code:
        words["--trust_remote_code"] = "true"
    if config.learner.cast_lm_head_to_fp32:
        words["--cast_lm_head_to_fp32"] = "true"
    if config.learner.router_replay:
        words[f"--vllm.{RETURN_FLAG}"] = "true"
    flags = [part for pair in words.items() for part in pair]
    return ServerPlan(count, (sys.executable, "-m", "agentrl", "serve", *flags))


class LaunchedEngine(ServerEngine):
    """vLLM servers that are started when the engine is entered, and end with it."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainConfig,
        launcher: str,
        plan: ServerPlan,
        update: _Update,
        weight_sync_timeout_s: float = 10.0,
        rendezvous: Rendezvous = ANYWHERE,
    ) -> None:
        e = config.engine
        unknown = [""] * plan.count  # the addresses, until the servers run
        super().__init__(
            unknown,
            model,
            capacity=e.max_num_seqs,
            max_context=e.max_model_len,
            update=update,
            weight_sync_timeout_s=weight_sync_timeout_s,
            rendezvous=rendezvous,
            return_routed_experts=config.learner.router_replay,
        )
        self._launcher, self._plan, self._servers = launcher, plan, AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._urls = tuple(await self._servers.enter_async_context(launch_servers(self._launcher, self._plan)))
        try:
            return await super().__aenter__()
        except BaseException:
            await self._servers.aclose()
            raise

    async def __aexit__(self, *exception: object) -> None:
        try:
            await super().__aexit__(*exception)
        finally:
            await self._servers.aclose()


_Update = Literal["in-flight", "drain"]


@asynccontextmanager
async def launch_servers(name: str, plan: ServerPlan) -> AsyncIterator[Sequence[str]]:
    """Start servers by the named launcher; end them when the block ends.

    Raises:
        UserError: there is no such launcher, or it starts none.
    """
    launcher: Launcher = load_registered("launcher", name)
    async with AsyncExitStack() as servers:
        with author_errors(f"launcher {name!r}"):
            urls = await servers.enter_async_context(launcher(plan))
        if len(urls) != plan.count or not all(str(url).startswith(("http://", "https://")) for url in urls):
            raise ContractError(f"launcher {name!r} gave {list(urls)!r:.200}, not {plan.count} URLs of servers")
        yield urls


@asynccontextmanager
async def local(plan: ServerPlan) -> AsyncIterator[Sequence[str]]:
    """Start the servers as processes of this machine.

    Raises:
        UserError: one ends before it answers; what it wrote stands above.
    """
    processes = [_start(plan.command) for _ in range(plan.count)]
    try:
        yield [await to_thread.run_sync(partial(_read_url, p), abandon_on_cancel=True) for p in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            await to_thread.run_sync(partial(_end, process))


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    # A session of its own: Ctrl-C in the terminal does not reach it; the run ends it.
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, OWNER: str(os.getpid())},  # where the run is killed, nobody else would end it
    )


def _read_url(process: subprocess.Popen[str]) -> str:
    """Read the line that a server prints when it answers."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("http"):
            threading.Thread(target=_pass_on, args=(process,), daemon=True).start()
            return line.strip()
    process.stdout.close()
    raise UserError(f"a server ended before it answered (exit status {process.wait()}); what it wrote stands above")


def _pass_on(process: subprocess.Popen[str]) -> None:
    """Pass on what a server writes later: a pipe that nobody reads would stop it."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            sys.stderr.write(line)


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
