"""verifiers: packages written for that library, unmodified; verifiers plays, and the policy is our gateway."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from agentrl import AgentEnv, ContractError, InfraError, Trajectory, UserError
from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.agents.line_worker import LineWorker, WorkerLost, tend_workers
from agentrl.runtime.threads import open_task_group, run_in_thread
from agentrl.types import Observation
from agentrl_envs.prompt_rows import hold_out_rows
from agentrl_envs.verifiers_venvs import find_package

_BRIDGE = Path(__file__).with_name("inside_verifiers") / "bridge.py"
_OF_THE_AGENT = ("ProviderError", "HarnessError")  # an episode that ends so is scored; any other error is a fault
_GRACE_S = 10.0  # to end tool servers and sandboxes
Place = tuple[str, int]  # of a task: the rows it is in, and its number there


class Verifiers(AgentEnv["VerifiersServer"]):
    """A task of a verifiers package: ``--env verifiers:NAME``, after ``agentrl env add verifiers:NAME``.

    Args:
        name: of the package.
        config: verifiers' own ``[env]`` block: ``--env.config.taskset.num_tasks 10`` is its
            ``--env.taskset.num-tasks 10``.
        eval_config: the same, laid over ``config`` for held-out tasks: ``--env.eval_config.taskset.split test``.
            Without it, and without a ``split`` of the taskset's own, the last tenth of the tasks (256 at most) is held
            out, all tasks that ask the same on one side.
        harness: that plays seats for which the package names none: one of verifiers', such as ``bash``, which runs what
            the model writes. By default the package's own, or a conversation with the tools of the task.
        runtime: of seats that would be in verifiers' hosted sandboxes: ``subprocess``, ``docker``, or ``prime`` for
            those.
        workers: processes that play.
        max_turns: of an episode.
    """

    named_by = "name"

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any] | None = None,
        eval_config: Mapping[str, Any] | None = None,
        harness: str = "",
        runtime: Literal["subprocess", "docker", "prime"] = "subprocess",
        workers: int = 1,
        max_turns: int = 20,
    ) -> None:
        if workers < 1:
            raise ContractError(f"env.workers is 1 or more, not {workers}")
        self.name, self.max_turns = name, max_turns
        self.place: Place = ("train", 0)
        self.outcome: dict[str, Any] | None = None  # of the episode, as the bridge describes it

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[VerifiersServer]:
        """Start verifiers in the package's venv."""
        package = await run_in_thread(partial(find_package, settings["name"]))
        given = {
            "taskset": package.name,
            "config": dict(settings.get("config") or {}),
            "eval_config": dict(settings.get("eval_config") or {}) or None,
            "harness": settings.get("harness", ""),
            "runtime": settings.get("runtime", "subprocess"),
        }
        words = [str(package.python), str(_BRIDGE), json.dumps(given)]
        async with VerifiersServer(package.name, words, settings.get("workers", 1)).open() as server:
            yield server

    def count(self, split: str) -> int | None:
        return len(self.shared.tasks[split])

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self.place = self.shared.tasks[(options or {}).get("split", "train")][seed]
        try:
            messages = await self.shared.ask({"show": self.place})
        except WorkerLost as lost:
            raise InfraError("verifiers_server", str(lost)) from None
        return messages or "(the environment speaks first)", {}

    async def play(self, task: AgentTask) -> AgentEnding:
        asked = {"task": self.place, "base_url": task.base_url, "api_key": task.api_key}
        try:
            self.outcome = await self.shared.ask({"play": asked})
        except WorkerLost as lost:
            return AgentEnding(f"verifiers: {lost}", killed=True, counted=lost.first)
        error = self._find_error()
        return AgentEnding() if error is None else AgentEnding(_describe_error(error), error.get("trace", ""))

    async def score(self, trajectory: Trajectory) -> dict[str, float | None]:
        assert self.outcome is not None  # it was played
        error = self._find_error()
        if error is not None and error["type"] not in _OF_THE_AGENT:
            kind = error["type"].removesuffix("Error").lower()
            raise InfraError(f"verifiers_{kind}", f"{_describe_error(error)}\n{error.get('trace', '')}".rstrip())
        traces = self.outcome["traces"]
        if untrained := [t["seat"] for t in traces if not t["trained"]]:
            raise ContractError(
                f"env 'verifiers:{self.name}' has a seat that is not trained, {untrained[0]!r}, and all that this "
                f"policy says is trained: give the seat another model by --env.config.{untrained[0]}.model and .client"
            )
        several = len({t["seat"] for t in traces}) > 1
        self.metrics = {n: fmean(values) for n, values in _gather(traces, "metrics", several).items()}
        self.extras = {"verifiers": [{"seat": t["seat"], "stop": t["stop"]} for t in traces]}
        parts = _gather(traces, "rewards", several)
        self.reward_weights = {n: pairs[0][1] for n, pairs in parts.items()}
        rewards: dict[str, float | None] = {n: fmean(score for score, _ in pairs) for n, pairs in parts.items()}
        self.shared.rewards |= self.reward_weights
        if error is not None:  # what it did not come to earns nothing
            rewards = {**dict.fromkeys(self.shared.rewards or {"reward": 1.0}, 0.0), **rewards}
        return rewards

    def _find_error(self) -> dict[str, str] | None:
        """Return what ended the episode, of the episode or of one of its traces; None where nothing did.

        What fails in the world may end another seat's trace as the agent's: it goes before that.
        """
        assert self.outcome is not None
        own = [e for trace in self.outcome.get("traces", ()) for e in trace["errors"][-1:]]
        errors = sorted([*own, *self.outcome["errors"][-1:]], key=lambda e: e["type"] in _OF_THE_AGENT)
        return next(iter(errors), None)


class VerifiersServer:
    """verifiers in a package's venv: processes that play, and the tasks by split.

    Args:
        words: of the command that starts one.
    """

    def __init__(self, name: str, words: Sequence[str], workers: int = 1) -> None:
        self.name = name
        # The keys of judges and data sets are the user's; what verifiers would send home is not.
        environment = {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1", "VIRTUAL_ENV": str(Path(words[0]).parents[1])}
        what = f"env 'verifiers:{name}'"
        self._workers = [LineWorker(what, words, environment, grace_s=_GRACE_S) for _ in range(workers)]
        self.tasks: dict[str, list[Place]] = {}
        self.rewards: dict[str, float] = {}  # weights, by the names that were seen

    @asynccontextmanager
    async def open(self) -> AsyncIterator[VerifiersServer]:
        """Start the processes; leaving the block ends them, and the tools and sandboxes that they started.

        Raises:
            UserError: the package cannot be played.
        """
        async with tend_workers(self._workers):
            async with open_task_group() as starting:
                for worker in self._workers:
                    starting.start_soon(self._start, worker)
            self.tasks = _split_tasks(self.name, self._workers[0].greeting["rows"])
            yield self

    async def _start(self, worker: LineWorker) -> None:
        try:
            await worker.start()
        except UserError as error:
            sentence = str(error)
            raise UserError(sentence if sentence.startswith(worker.what) else f"{worker.what}: {sentence}") from None

    async def ask(self, message: Mapping[str, object]) -> Any:
        """Ask the process that has least to do. Raises WorkerLost where it ends."""
        worker = min(self._workers, key=lambda w: w.load)
        return (await worker.ask(message))["answer"]


def _split_tasks(name: str, rows: Mapping[str, Sequence[str]]) -> dict[str, list[Place]]:
    """Split tasks, by the digests of what they ask: no question is on both sides.

    Raises:
        UserError: none is left to train on.
    """
    if "eval" in rows:
        held = set(rows["eval"])
        train = [i for i, digest in enumerate(rows["train"]) if digest not in held]
        splits = {
            "train": [("train", i) for i in train],
            "test": [("eval", i) for i in range(len(rows["eval"]))],
        }
    else:
        numbered = [{"prompt": digest, "row": i} for i, digest in enumerate(rows["train"])]
        parts = hold_out_rows(numbered, "prompt")
        splits = {split: [("train", row["row"]) for row in part] for split, part in parts.items()}
    for split, places in splits.items():
        if not places:
            what = "to train on" if split == "train" else "to evaluate on"
            raise UserError(
                f"env 'verifiers:{name}' has {len(rows['train'])} tasks, and none is left {what} once no question is "
                "on both sides: give it more, or held-out tasks of their own by --env.eval_config.taskset.NAME VALUE"
            )
    return splits


def _gather(traces: Sequence[Mapping[str, Any]], kind: str, several: bool) -> dict[str, list[Any]]:
    """Gather what traces have by name, behind the seat's name where there are several seats."""
    values: dict[str, list[Any]] = defaultdict(list)
    for trace in traces:
        for name, value in trace[kind].items():
            if value is not None:
                values[f"{trace['seat']}/{name}" if several else name].append(value)
    return values


def _describe_error(error: Mapping[str, str]) -> str:
    lines = error["message"].strip().splitlines()
    return error["type"] + (f": {lines[0][:300]}" if lines else "")
