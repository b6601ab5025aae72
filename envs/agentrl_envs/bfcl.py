"""bfcl: the multi-turn tasks of the Berkeley Function Calling Leaderboard, on its own stateful APIs."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anyio import to_thread

from agentrl import ContractError, Reply, Step, Tool, ToolCall, ToolEnv, Trajectory, UserError
from agentrl.errors import suggest
from agentrl.types import ExpertTurn, Message, Observation
from agentrl_envs import bfcl_world
from agentrl_envs.bfcl_world import ApiInstances, read_json_lines
from agentrl_envs.splits import assign_split

CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
STEPS = 20  # replies with calls, to one user's message; their runner gives up there too
DONE, ASKS = "It is done.", "I cannot do that with what I know; please tell me more."
_MORE = "I have updated some more functions you can choose from. What about now?"

Row = Mapping[str, Any]


class BFCL(ToolEnv):
    """Requests of a user, one after the other, that calls of functions fulfil: ``--env bfcl:multi_turn_base``.

    The tasks of the four categories are variants of the same 200; one in eight of those is held out in all of them.
    The split ``all`` has every task, as the leaderboard does.

    Args:
        name: a category, or ``multi_turn`` for the four together.
    """

    named_by = "name"
    max_turns = 60
    hidden: Set[str] = frozenset()  # the functions that the model is not told of yet

    def __init__(self, name: str = "multi_turn") -> None:
        if name not in (*CATEGORIES, "multi_turn"):
            raise ContractError(f"bfcl has no category {name!r}{suggest(name, (*CATEGORIES, 'multi_turn'))}")
        self.name = name

    @classmethod
    @asynccontextmanager
    async def open_shared(cls, **settings: Any) -> AsyncIterator[Mapping[str, Sequence[Row]]]:
        """Load the rows by split, and import the APIs off the event loop."""
        found = await to_thread.run_sync(_load_tasks, cls(**settings).name)
        await to_thread.run_sync(bfcl_world.import_apis, {c for row in found["all"] for c in row["involved_classes"]})
        yield found

    def list_splits(self) -> Sequence[str]:
        return ("train", "test", "all")

    def count(self, split: str) -> int | None:
        return len(self.shared[split])

    async def reset(self, *, seed: int, options: Mapping[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        chosen = self.shared[(options or {}).get("split", "train")]
        self.row = row = chosen[seed % len(chosen)]
        self.user_turn = self.steps = 0
        self.valid, self.over = True, False
        self.world, self.wanted = await to_thread.run_sync(lambda: (ApiInstances(row), ApiInstances(row)))
        self.told: list[str] = []  # what the functions said, in all turns
        self.called = False  # in this turn of the user
        held_out = {name for names in row.get("missed_function", {}).values() for name in names}
        functions = bfcl_world.load_documents(find_data_folder(), row["involved_classes"])
        self.tools = [bfcl_world.make_tool(document, self._call) for document in functions.values()]
        self.hidden = held_out & functions.keys()
        return self._asked(), {"id": row["id"], "expected": row["ground_truth"]}

    @property
    def tool_list(self) -> Sequence[Tool]:
        """List the functions that the model knows. As in their runner, the others can be called all the same."""
        return [t for t in super().tool_list if t.name not in self.hidden]

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        result = self.world.call(name, (), arguments)
        self.told.append(result)
        self.called = True
        return result

    async def step(self, action: Reply) -> Step:
        if not action.tool_calls:
            return self._next_turn()
        results: list[Message] = [{"role": "tool", "content": ""} for _ in action.tool_calls]
        for call, slot in zip(action.tool_calls, results, strict=True):  # one after the other: they change the world
            await self._answer(call, slot)
        self._turn += 1
        self.steps += 1
        return Step(results, 0.0, False, self.steps >= STEPS, {})

    def _next_turn(self) -> Step:
        """Judge the state after a request that the model has no more calls for; return the next request."""
        self.valid = self.valid and self._right()
        self.user_turn, self.steps, self.called = self.user_turn + 1, 0, False
        self.over = self.user_turn == len(self.row["question"])
        return Step([] if self.over else self._asked(), 0.0, self.over, False, {})

    def _right(self) -> bool:
        wanted = [self.wanted.call(*bfcl_world.parse_call(c)) for c in self.row["ground_truth"][self.user_turn]]
        if not wanted:
            return True  # the request lacks something; what was called nevertheless shows in the next state
        return self.called and self.world == self.wanted and bfcl_world.contains_all(self.told, wanted)

    def _asked(self) -> list[Message]:
        """Return the user's next message, with the schemas of functions that are added: the prompt cannot change."""
        added = self.row.get("missed_function", {}).get(str(self.user_turn), [])
        if not added:
            return [dict(m) for m in self.row["question"][self.user_turn]]  # type: ignore[misc]
        self.hidden = self.hidden - set(added)
        schemas = [t.schema for t in self.tool_list if t.name in added]
        return [{"role": "user", "content": f"{json.dumps(schemas)}\n{_MORE}"}]

    async def expert(self) -> AsyncGenerator[ExpertTurn, list[Message]]:
        """Make the calls of the ground truth, request by request; where something lacks, ask for it."""
        for wanted in self.row["ground_truth"]:
            for call in map(self._make_call, wanted):
                yield call
            yield DONE if wanted else ASKS

    def _make_call(self, text: str) -> ToolCall:
        """Make a call out of the ground truth, its arguments by their names."""
        name, positional, named = bfcl_world.parse_call(text)
        parameters = next(t.parameters["properties"] for t in self.tool_list if t.name == name)
        return ToolCall("", name, {**dict(zip(parameters, positional, strict=False)), **named})

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        return {"correct": float(self.valid and self.over)}


def _load_tasks(name: str) -> dict[str, list[Row]]:
    """Load the tasks of a category by split, each with its ``ground_truth``."""
    found: list[Row] = []
    for category in CATEGORIES if name == "multi_turn" else (name,):
        file = f"BFCL_v4_{category}.json"
        answers = {a["id"]: a["ground_truth"] for a in read_json_lines(find_data_folder() / "possible_answer" / file)}
        found += [{**row, "ground_truth": answers[row["id"]]} for row in read_json_lines(find_data_folder() / file)]
    sides = [assign_split(f"bfcl/{row['id'].rpartition('_')[2]}") for row in found]
    by_split = {s: [row for row, side in zip(found, sides, strict=True) if side == s] for s in ("train", "test")}
    return {**by_split, "all": found}


def find_data_folder() -> Path:
    """Return the folder of the package's data. Raises UserError if the package is missing."""
    spec = find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "env 'bfcl' needs the package bfcl-eval, without what it asks for (another torch, another numpy): "
            "pip install --no-deps bfcl-eval, then pip install 'agentrl-gym[bfcl]'"
        )
    return Path(spec.submodule_search_locations[0]) / "data"
