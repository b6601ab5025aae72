"""The submission's process: it holds the code that is judged, and does what the tests ask of it.

It gets arguments and no test. Requests are lists ``[operation, target, arguments, keywords]``; the answers are lines of
their number and JSON, down a descriptor of their own: what the code prints is dropped.

    {"v": value}    {"v": value, "m": {place: argument as the call left it}}    {"x": [names of classes, text]} raised

A value that is not plain is kept here and named by a number, ``{"h": number}``; a class of exceptions is ``{"e":
names}``.
"""

from __future__ import annotations

import builtins
import itertools
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from agentrl_envs.rewards.inside import plain_data
from agentrl_envs.rewards.inside.plain_data import Data, Value

NAME = "solution"  # of the module that the code is
BATCH = 16  # items of an iterator that are fetched at once
MAX_CHARS = 1 << 20  # of one answer
_EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit)


class Submission:
    """The code's own module, and the objects that tests hold by number."""

    def __init__(self) -> None:
        self.out = os.dup(1)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        self.module = types.ModuleType(NAME)
        self.kept: list[Value] = []
        self.numbers: dict[int, int] = {}
        self.operations: dict[str, Callable[..., Any]] = {
            "call": lambda target, /, *given, **named: target(*given, **named),
            "getattr": getattr,
            "setattr": setattr,
            "delattr": delattr,
            "getitem": lambda target, key: target[key],
            "setitem": lambda target, key, value: target.__setitem__(key, value),
            "delitem": lambda target, key: target.__delitem__(key),
            "len": len,
            "bool": bool,
            "str": str,
            "repr": repr,
            "iter": iter,
            "next": next,
            "take": lambda target: list(itertools.islice(target, BATCH)),
            "isinstance": lambda target, value: isinstance(value, target),
            "enter": lambda target: target.__enter__(),
            "exit": lambda target: target.__exit__(None, None, None),
            "await": _run_coroutine,
        }

    def define(self, source: str) -> bool:
        """Run the code. Return False if it raises, which is the answer -1."""
        sys.modules[NAME] = self.module
        try:
            exec(compile(source, f"<{NAME}>", "exec"), self.module.__dict__)
            answer: dict[str, Data] = {"v": None}
        except BaseException as error:
            answer = _describe(error)
        self._write(-1, json.dumps(answer))
        return "v" in answer

    def handle(self, requests: str) -> None:
        for number, request in enumerate(json.loads(requests)):
            try:
                answer = json.dumps(self._answer(*request))
                if len(answer) > MAX_CHARS:
                    raise ValueError(f"the answer is longer than {MAX_CHARS} characters")
            except BaseException as error:
                answer = json.dumps(_describe(error))
            self._write(number, answer)

    def _answer(self, operation: str, target: Data, given: list[Value], named: dict[str, Data]) -> dict[str, Data]:
        if operation == "names":
            return {"v": {name: self._encode(found) for name in given if (found := self._find(name)) is not ...}}
        found = plain_data.decode_value(target, self._decode)
        arguments = [plain_data.decode_value(a, self._decode) for a in given]
        keywords = {k: plain_data.decode_value(v, self._decode) for k, v in named.items()}
        made = self.operations[operation](found, *arguments, **keywords)
        is_new = operation == "call" and isinstance(found, type) and found.__module__ == NAME
        answer = {"v": self._keep(made) if is_new else self._encode(made)}
        if operation == "call" and made is None:
            answer["m"] = self._list_changes(given, arguments)
        return answer

    def _list_changes(self, given: list[Value], arguments: list[Value]) -> dict[str, Data]:
        """List the arguments that a call which returned nothing has changed in place, as ``sort`` would."""
        changes = {}
        for place, (before, value) in enumerate(zip(given, arguments, strict=True)):
            if isinstance(value, list | dict | set) and (after := self._encode(value)) != before:
                changes[str(place)] = after
        return changes

    def _find(self, name: str) -> Value:
        found = self.module.__dict__.get(name, ...)
        return ... if isinstance(found, types.ModuleType) else found

    def _encode(self, value: Value) -> Value:
        return plain_data.encode_value(value, self._encode_other)

    def _encode_other(self, value: Value) -> Value:
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"e": plain_data.list_classes(value)}
        reduced = ... if id(value) in self.numbers else plain_data.reduce(value)
        return self._keep(value) if reduced is ... else self._encode(reduced)

    def _keep(self, value: Value) -> Value:
        """Keep an object here, under one number however often it is sent."""
        if value is None or type(value) in (bool, int, float, str, list, dict, tuple, set):
            return self._encode(value)
        number = self.numbers.setdefault(id(value), len(self.kept))
        if number == len(self.kept):
            self.kept.append(value)
        return {"h": number}

    def _decode(self, data: dict[str, Data]) -> Value:
        if "e" in data:
            name = data["e"][0]
            return self.module.__dict__.get(name) or getattr(builtins, name)
        return self.kept[data["h"]] if "h" in data else self._resolve(data["n"])

    def _resolve(self, name: str) -> Value:
        """Return what the tests call: a global, a method of a class ``Solution``, or an expression."""
        names = self.module.__dict__
        if name in names or not name.isidentifier():
            return names[name] if name in names else eval(name, names)
        if not hasattr(names.get("Solution"), name):
            raise NameError(f"name {name!r} is not defined")
        return getattr(names["Solution"](), name)

    def _write(self, number: int, answer: str) -> None:
        line = f"{number} {answer}\n".encode()
        while line:
            line = line[os.write(self.out, line) :]


def _run_coroutine(target: Data) -> Value:
    import asyncio

    async def run() -> Value:
        return await target

    return asyncio.run(run())


def _describe(error: BaseException) -> dict[str, Data]:
    """Describe an exception by its classes, most special first, and its text. One that would end a program does not."""
    names = ["RuntimeError"] if isinstance(error, _EXITS) else plain_data.list_classes(type(error))
    try:
        text = str(error)[:1000]
    except BaseException:
        text = ""
    return {"x": [names, text]}
