"""The tests' process: it runs statements, and has what they ask of the submission done in the other process.

The statements see the submission's functions and objects as `Proxy`: only plain values cross, and every comparison is
made here. They run in a thread of their own, which waits where it asks; the session's call ends there, and the next one
brings the answer.
"""

from __future__ import annotations

import _thread
import builtins
import importlib
import json
import os
import sys
import types
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any, TypeVar

from agentrl_envs.rewards.inside import plain_data
from agentrl_envs.rewards.inside.plain_data import Data, Value

NAME = "solution"  # the module as which tests may import the submission
T = TypeVar("T")


class Unjudgeable(BaseException):
    """The tests ask for something that cannot cross, such as a call with a function of their own."""


class Proxy:
    """A function, a class or an object of the submission's. It is equal to itself only."""

    def __init__(self, examiner: Examiner, target: dict[str, Data]) -> None:
        object.__setattr__(self, "_examiner", examiner)
        object.__setattr__(self, "_target", target)

    def __call__(self, *given: Value, **named: Value) -> Value:
        return _ask(self, "call", *given, **named)

    def __getattr__(self, name: str) -> Value:
        if name.startswith("__array"):  # numpy would read memory at an address of the submission's choice
            raise AttributeError(name)
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Value) -> None:
        _ask(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delattr", name)

    def __getitem__(self, key: Any) -> Value:
        return _ask(self, "getitem", key)

    def __setitem__(self, key: Any, value: Value) -> None:
        _ask(self, "setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        _ask(self, "delitem", key)

    def __len__(self) -> int:
        return _plain(_ask(self, "len"), int)

    def __bool__(self) -> bool:
        return _plain(_ask(self, "bool"), bool)

    def __str__(self) -> str:
        return _plain(_ask(self, "str"), str)

    def __repr__(self) -> str:
        return _plain(_ask(self, "repr"), str)

    def __iter__(self) -> Iterator[Any]:
        iterator = _ask(self, "iter")
        while items := _plain(_ask(iterator, "take"), list):
            yield from items

    def __next__(self) -> Value:
        return _ask(self, "next")

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Proxy) and _plain(_ask(self, "isinstance", value), bool)

    def __enter__(self) -> Value:
        return _ask(self, "enter")

    def __exit__(self, *_: object) -> None:
        _ask(self, "exit")

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return _ask(self, "await")


def _ask(remote: Any, operation: str, *given: Value, **named: Value) -> Value:
    if not isinstance(remote, Proxy):
        raise TypeError(f"{type(remote).__name__!r} is no object of the submission's")
    examiner: Examiner = object.__getattribute__(remote, "_examiner")
    return examiner.ask(operation, object.__getattribute__(remote, "_target"), given, named)


def _plain(value: object, kind: type[T]) -> T:
    """Return a value of this very type. Raises TypeError for another, as Python does for a wrong ``__len__``."""
    if not isinstance(value, kind) or type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, not {type(value).__name__}")
    return value


class Examiner:
    """The statements, what of the submission they see, and where they are.

    Args:
        wanted: names that the statements take from the submission.
        names: its answer to which of them it has.
        modules: names of theirs that are modules, and which.
        ready: what was asked beforehand, and the answers, in order.
        calls: whether the statements call the submission anywhere.
    """

    def __init__(
        self,
        tests: str,
        wanted: Sequence[str],
        names: str,
        modules: dict[str, str],
        ready: Sequence[tuple[str, str]],
        calls: bool,
    ) -> None:
        self.out = os.dup(1)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        self.tests, self.modules, self.calls = tests, modules, calls
        self.ready = deque(ready)
        self.remotes: dict[str, Proxy] = {}
        self.exceptions: dict[str, type[BaseException]] = {}
        said = json.loads(names)["v"]
        self.names = {name: said[name] for name in wanted if name in said}
        self.asked, self.answered = _thread.allocate_lock(), _thread.allocate_lock()
        self.asked.acquire()
        self.answered.acquire()
        self.message: dict[str, Data] = {}
        self.answer = ""
        self.uses = 0
        self.deviated = False
        self.unjudgeable: str | None = None
        self.verdict: dict[str, Data] | None = None

    def start(self) -> None:
        """Run the statements to their first question, or to their end; say which."""
        _thread.start_new_thread(self._examine, ())
        self._wait()

    def resume(self, answer: str) -> None:
        """Give the answer to the last question, and run on."""
        self.answer = answer
        self.answered.release()
        self._wait()

    def _wait(self) -> None:
        self.asked.acquire()
        line = json.dumps(self.verdict or self.message).encode() + b"\n"
        while line:
            line = line[os.write(self.out, line) :]

    def _examine(self) -> None:
        try:
            passed = self._run()
        except SystemExit as end:  # of the tests' own, as unittest.main ends; the submission's cross as errors
            passed = end.code in (None, 0)
        except BaseException:
            passed = False
        if self.unjudgeable is None and passed and self.calls and not self.uses:
            self.unjudgeable = "the tests end without having called the answer"
        self.verdict = {"passed": passed, "deviated": self.deviated, "unjudgeable": self.unjudgeable}
        self.asked.release()

    def _run(self) -> bool:
        main, solution = types.ModuleType("__main__"), types.ModuleType(NAME)
        sys.modules.update({"__main__": main, NAME: solution})
        for name, data in self.names.items():
            value = self._remote({"n": name}) if isinstance(data, dict) and "h" in data else self._decode(data)
            setattr(main, name, value)
            setattr(solution, name, value)
        for name, module in self.modules.items():
            setattr(main, name, importlib.import_module(module))
        exec(compile(self.tests, "<tests>", "exec"), main.__dict__)
        if not self.uses:
            for name, test in list(main.__dict__.items()):
                if name.startswith("test") and isinstance(test, types.FunctionType) and not test.__code__.co_argcount:
                    test()
        return True

    def ask(self, operation: str, target: dict[str, Data], given: Sequence[Value], named: dict[str, Value]) -> Value:
        """Have the submission do something. Raises what it raises."""
        arguments = [self._encode(a) for a in given]
        keywords = {k: self._encode(v) for k, v in named.items()}
        request = json.dumps([operation, target, arguments, keywords])
        self.uses += 1
        answer = json.loads(self._exchange(request))
        if "x" in answer:
            raise self._build_exception(*answer["x"])
        value = self._decode(answer["v"])
        if value is None:
            for place, data in answer.get("m", {}).items():
                _replace(given[int(place)], self._decode(data))
        return value

    def _exchange(self, request: str) -> str:
        if not self.ready:
            self.message = {"ask": request}
            self.asked.release()
            self.answered.acquire()
            return self.answer
        known, answer = self.ready.popleft()
        if known != request:
            self.deviated = True
            raise Unjudgeable
        return answer

    def _encode(self, value: Value) -> Value:
        return plain_data.encode_value(value, self._encode_other)

    def _encode_other(self, value: Value) -> Value:
        if type(value) is Proxy:
            return object.__getattribute__(value, "_target")
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"e": plain_data.list_classes(value)}
        reduced = plain_data.reduce(value)
        if reduced is ...:
            self.unjudgeable = f"a {type(value).__name__} of the tests' own cannot be passed to the answer"
            raise Unjudgeable(self.unjudgeable)
        return self._encode(reduced)

    def _decode(self, data: Data) -> Value:
        return plain_data.decode_value(data, self._decode_other)

    def _decode_other(self, data: dict[str, Data]) -> Value:
        return self._find_exception(data["e"]) if "e" in data else self._remote({"h": int(data["h"])})

    def _remote(self, target: dict[str, Data]) -> Proxy:
        return self.remotes.setdefault(str(target), Proxy(self, target))

    def _build_exception(self, names: list[str], text: str) -> BaseException:
        kind = self._find_exception(names)
        return kind.__new__(kind, str(text))

    def _find_exception(self, names: list[str]) -> type[BaseException]:
        """Return a class of exceptions by its name and its bases'; none that would end the tests."""
        kind: type[BaseException] = RuntimeError
        for name in reversed([str(n) for n in names[:20]]):
            own = getattr(builtins, name, None)
            if isinstance(own, type) and issubclass(own, Exception):
                kind = own
            else:
                kind = self.exceptions.setdefault(name, type(name, (kind,), {}))
        return kind


def _replace(value: Value, by: Value) -> None:
    """Make a list, dict or set of the tests' what the submission made of its copy."""
    if type(value) is not type(by):
        raise TypeError(f"a {type(value).__name__} became a {type(by).__name__}")
    if isinstance(value, list):
        value[:] = by
    elif isinstance(value, dict | set):
        value.clear()
        value.update(by)
