"""A program for the venv of a verifiers package: ``python bridge.py SETTINGS``. It serves verifiers' own ``Env``.

SETTINGS is JSON: ``taskset`` (the package's name), ``config`` and ``eval_config`` (blocks of verifiers' ``[env]``, the
second laid over the first for held-out tasks), ``harness`` and ``runtime`` (of seats that name none).

A line of JSON on stdin begins an episode (``id``, ``play``), asks for a task (``id``, ``show``) or cancels (``id``,
``cancel``); a line on stdout answers (``id``, ``answer``), or says at once that a cancellation was heard (``heard``).
The first line says what there is to play, or why there is nothing (``refused``). What the package prints goes to
stderr. The end of stdin ends everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import json
import os
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

Answer = Callable[[dict[str, Any]], object]
_MOST = 1 << 12  # tasks of a taskset that has no end, where its settings name no other number
_HELD_OUT = ("test", "validation", "val", "eval", "dev")  # what splits for evaluation are called
_KEY = "AGENTRL_API_KEY"  # as is said in the header; the switch puts the episode's own in its place


class Refused(Exception):
    """The package cannot be played, in a sentence."""


def serve_package() -> None:
    """Serve what the arguments name, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # print() of the package is no answer

    def answer(message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):  # who asked is gone
            answers.write(json.dumps(message) + "\n")

    try:
        package = Package(**json.loads(sys.argv[1]))
    except Refused as refusal:
        answer({"refused": str(refusal)})
        return
    except KeyboardInterrupt:
        return
    except Exception as error:  # of the package's own code, or of a setting
        if not (settings := _describe_settings(error)):
            traceback.print_exc()
        answer({"refused": settings or f"it cannot be loaded: {_describe_raised(error)}"})
        return
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(package.serve(answer))
    except Exception as error:
        answer({"refused": f"it cannot be served: {_describe_raised(error)}"})
        raise


def _describe_raised(error: BaseException) -> str:
    """Describe an exception by its type and the beginning of what it says."""
    said = " ".join(str(error).split())
    return type(error).__name__ + (f": {said[:300]}" if said else "")


def _describe_settings(error: Exception) -> str:
    """Describe what is wrong with the settings; empty where it is something else."""
    if isinstance(error, ModuleNotFoundError) and str(error).startswith("harness "):
        return str(error)
    if type(error).__name__ != "ValidationError" or not hasattr(error, "errors"):
        return ""
    return "; ".join(f"config.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())


class Package:
    """A package's tasks, and the ``Env`` of verifiers that plays them."""

    def __init__(
        self, taskset: str, config: dict[str, Any], eval_config: dict[str, Any] | None, harness: str, runtime: str
    ) -> None:
        _check_package(taskset)
        from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment, load_taskset

        block = _lay_over(config, {"taskset": {"id": taskset}})
        config_type = env_config_type(taskset, block.get("id") or "")
        own = default_harness_id(taskset)  # "bash" where the package brings none
        harness = harness or (own if own != "bash" else "agentrl_chat")
        block = _set_seats(block, _list_seats(config_type), harness, runtime)
        eval_block = _lay_over(block, eval_config) if eval_config else _choose_split(config_type, block)
        self.env = load_environment(_read_config(config_type, block))
        self.rows = {"train": _load_tasks(self.env.taskset)}
        if eval_block is not None:
            self.rows["eval"] = _load_tasks(load_taskset(_read_config(config_type, eval_block).taskset))
        if not self.rows["train"]:
            raise Refused("it has no tasks")
        _check_reward(self.env, self.rows["train"][0])
        self.switch = Switch()
        self.running: dict[int, asyncio.Task[None]] = {}

    def describe(self) -> dict[str, Any]:
        """Describe what there is to play: digests of the tasks' questions, by the rows they come from."""
        return {"ready": True, "rows": {name: [_digest(task) for task in tasks] for name, tasks in self.rows.items()}}

    async def serve(self, answer: Answer) -> None:
        """Answer what stdin asks for, until it ends."""
        reader = asyncio.StreamReader(limit=1 << 30)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async with self.switch.open(), self.env.serving():
            answer(self.describe())
            while line := await reader.readline():
                asked = json.loads(line)
                number = asked["id"]
                if "show" in asked:
                    answer({"id": number, "answer": _show_task(self._find(asked["show"]))})
                elif "play" in asked:
                    self.running[number] = asyncio.create_task(self._answer(number, asked["play"], answer))
                    self.running[number].add_done_callback(partial(self._forget, number))
                else:
                    answer({"id": number, "heard": True})
                    if number in self.running:
                        self.running[number].cancel()
            for task in [*self.running.values()]:
                task.cancel()
            await asyncio.gather(*self.running.values(), return_exceptions=True)

    def _forget(self, number: int, _: asyncio.Task[None]) -> None:
        del self.running[number]

    def _find(self, place: Sequence[Any]) -> Any:
        rows, row = place
        return self.rows[rows][row]

    async def _answer(self, number: int, asked: dict[str, Any], answer: Answer) -> None:
        try:
            answer({"id": number, "answer": await self.play(**asked)})
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            answer({"id": number, "answer": {"errors": [{"type": type(error).__name__, "message": str(error)}]}})

    async def play(self, task: Sequence[Any], base_url: str, api_key: str) -> dict[str, Any]:
        """Play an episode of a task against an endpoint; return what came of it."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.types import SamplingConfig

        # One client for all episodes: verifiers keeps a client for each config, and to make one takes 20 ms.
        client = EvalClientConfig(base_url=self.switch.base_url, api_key_var=_KEY)
        context = ModelContext(model="policy", client=client, sampling=SamplingConfig())
        (slot,) = self.env.slots(self._find(task))
        begin = partial(self.switch.begin, base_url, api_key)
        try:
            return _describe_episode(await self.env.run_slot(slot, context, on_trace=begin))
        finally:
            self.switch.forget(api_key)


class Switch:
    """An endpoint that passes requests on, each under the key of its episode, known by verifiers' session header."""

    def __init__(self) -> None:
        self.base_url = ""
        self.episodes: dict[str, tuple[str, str]] = {}  # base URLs and keys, by the ids of traces

    def begin(self, base_url: str, key: str, trace: Any) -> None:
        """Pass on what a trace asks, from now on."""
        self.episodes[trace.id] = (base_url, key)

    def forget(self, key: str) -> None:
        """Pass nothing on any more under a key."""
        self.episodes = {trace: episode for trace, episode in self.episodes.items() if episode[1] != key}

    @contextlib.asynccontextmanager
    async def open(self) -> typing.AsyncIterator[None]:
        """Serve on this machine's loopback."""
        import aiohttp
        from aiohttp import web

        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/v1/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            limits = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=limits, timeout=aiohttp.ClientTimeout(total=None)) as self._http:
                yield
        finally:
            await runner.cleanup()

    async def _pass_on(self, request: Any) -> Any:
        from aiohttp import web

        episode = self.episodes.get(request.headers.get("X-Session-ID", ""))
        if episode is None:
            return web.json_response({"error": {"message": "this session is of no episode that runs"}}, status=401)
        base_url, key = episode
        kept = ("content-type", "anthropic-version", "anthropic-beta", "openai-beta", "x-stainless-retry-count")
        headers = {name: request.headers[name] for name in kept if name in request.headers}
        headers |= {"authorization": f"Bearer {key}", "x-api-key": key}
        url = f"{base_url}/{request.match_info['path']}"
        async with self._http.request(request.method, url, data=await request.read(), headers=headers) as reply:
            return web.Response(
                body=await reply.read(),
                status=reply.status,
                headers={"content-type": reply.headers.get("content-type", "application/json")},
            )


def _check_package(taskset: str) -> None:
    """Raise Refused where there is no taskset for this version of verifiers."""
    try:
        from verifiers.v1.utils.loaders import import_taskset, taskset_class
    except ImportError as error:
        raise Refused(f"its venv has no verifiers that serves tasksets ({error})") from None
    try:
        module = import_taskset(taskset)
    except AttributeError as error:
        if "module 'verifiers'" in str(error):
            raise Refused(_describe_classic(str(error))) from None
        raise
    except ImportError as error:
        if error.name == "verifiers" or (error.name or "").startswith("verifiers."):
            raise Refused(_describe_classic(str(error))) from None
        raise
    if hasattr(module, "load_environment") and not hasattr(module, "__all__"):
        raise Refused(_describe_classic("it has load_environment and exports no Taskset"))
    try:
        taskset_class(taskset)
    except (TypeError, AttributeError, ValueError) as error:
        raise Refused(f"it exports no taskset: {error}") from None


def _describe_classic(why: str) -> str:
    return (
        f"it is written for verifiers before its tasksets ({why}), which this version of verifiers does not run; "
        "its authors may have a version with a Taskset"
    )


def _check_reward(env: Any, task: Any) -> None:
    """Raise Refused where nothing scores an episode: no reward, no judge, and no finalize of the environment's."""
    from verifiers.v1.env import Env

    if not task.hooks("reward") and not task.plugged_judges() and type(env).finalize is Env.finalize:
        raise Refused(
            f"{type(task).__name__} has no reward, so there is nothing to learn from: give it a method marked "
            "@vf.reward, or --env.config.taskset.task.rewards.NAME.fn FILE.py:FUNCTION"
        )


def _list_seats(config_type: Any) -> dict[str, Any]:
    """List the seats of an environment by name: what its config declares of them."""
    from verifiers.v1.configs.agent import AgentConfig

    fields = config_type.model_fields.items()
    return {name: field.default for name, field in fields if isinstance(field.default, AgentConfig)}


def _set_seats(block: dict[str, Any], seats: dict[str, Any], harness: str, runtime: str) -> dict[str, Any]:
    """Give the seats that name no harness one, and those in verifiers' hosted sandboxes a runtime here."""
    given: dict[str, Any] = {}
    for name, seat in seats.items():
        given[name] = {} if seat.harness is not None else {"harness": {"id": harness}}
        if seat.runtime.type == "prime":
            given[name]["runtime"] = {"type": runtime}
    return _lay_over(given, block)


def _choose_split(config_type: Any, block: dict[str, Any]) -> dict[str, Any] | None:
    """Return the settings of held-out tasks where the taskset has splits of its own, and set its own for training."""
    taskset = block["taskset"]
    field = type(_read_config(config_type, block).taskset).model_fields.get("split")
    values = [v for v in typing.get_args(field.annotation) if isinstance(v, str)] if field is not None else []
    held_out = next((name for name in _HELD_OUT if name in values), None)
    if "train" not in values or held_out is None or taskset.get("split", "train") != "train":
        return None
    taskset["split"] = "train"
    return _lay_over(block, {"taskset": {"split": held_out}})


def _read_config(config_type: Any, block: dict[str, Any]) -> Any:
    return config_type.model_validate(copy.deepcopy(block))  # it would write into the block


def _load_tasks(taskset: Any) -> list[Any]:
    return list(islice(iter(taskset), None if taskset.bounded else _MOST))


def _lay_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return nested tables as one; the second one's values win."""
    tables = {
        k: _lay_over(below[k], v) for k, v in above.items() if isinstance(v, dict) and isinstance(below.get(k), dict)
    }
    return {**below, **above, **tables}


def _show_task(task: Any) -> list[dict[str, str]]:
    """Return the messages that a task begins with, as text."""
    data = task.data
    prompt = [("user", data.prompt)] if isinstance(data.prompt, str) else list(_read_messages(data.prompt or ()))
    said = [("system", data.system_prompt)] if data.system_prompt else []
    return [{"role": role, "content": text} for role, text in (*said, *prompt)]


def _read_messages(messages: Sequence[Any]) -> Iterator[tuple[str, str]]:
    from verifiers.v1.types import content_text

    return ((message.role, content_text(message.content) or "") for message in messages)


def _digest(task: Any) -> str:
    """Compute a digest of what a task asks, whatever its white space; all of its data where it has no prompt."""
    said = [f"{m['role']}: {' '.join(m['content'].split())}" for m in _show_task(task)]
    if task.data.prompt is None:
        said.append(json.dumps(task.data.model_dump(mode="json", exclude={"idx", "id", "name"}), sort_keys=True))
    return hashlib.blake2b("\n".join(said).encode("utf-8", "replace"), digest_size=12).hexdigest()


def _describe_episode(episode: Any) -> dict[str, Any]:
    """Describe an episode: the rewards, metrics and errors of each trace."""
    return {"errors": _describe_errors(episode), "traces": [_describe_trace(trace) for trace in episode.traces]}


def _describe_trace(trace: Any) -> dict[str, Any]:
    rewards = {name: None if r is None else [float(r.score), float(r.weight)] for name, r in trace.rewards.items()}
    return {
        "seat": trace.agent.name,
        "trained": bool(trace.agent.trainable),
        "rewards": rewards,
        "metrics": {name: float(value) for name, value in trace.metrics.items() if value is not None},
        "stop": trace.stop_condition or "",
        "errors": [] if trace.ok else _describe_errors(trace),
    }


def _describe_errors(one: Any) -> list[dict[str, str]]:
    return [{"type": e.type, "message": e.message, "trace": (e.traceback or "")[-4000:]} for e in one.errors]


if __name__ == "__main__":
    serve_package()
