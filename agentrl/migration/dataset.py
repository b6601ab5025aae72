"""The dataset that a script builds, as settings of the environment ``prompts``."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from agentrl.migration.literals import Scope, UnknownValueError
from agentrl.migration.plan import UNKNOWN, Plan

_FILES = (".jsonl", ".json", ".ndjson", ".parquet")
_OF_NO_CONSEQUENCE = ("shuffle", "remove_columns", "with_format", "set_format", "flatten_indices", "select_columns")
_SAVE = "after that line save it, dataset.to_json('rows.jsonl'), and set"


def read_dataset(scope: Scope, node: ast.expr | None, plan: Plan, setting: str) -> None:
    """Set ``env.data`` or ``env.test_data`` to what a script loads; say what it makes of it beyond that."""
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        if setting == "env.data":
            _leave(plan, setting, "the trainer has no train_dataset")
        return
    reason = "train_dataset" if setting == "env.data" else "eval_dataset"
    try:
        if (data := _DatasetReader(scope, plan, setting).read(node)) is not None:
            plan.set(setting, data, reason)
    except UnknownValueError as error:
        _leave(plan, setting, f"line {error.line}: the dataset is made by {error}, which is not run: {_SAVE} {setting}")


def _leave(plan: Plan, setting: str, why: str) -> None:
    plan.set(setting, f"{UNKNOWN}.jsonl", "")
    plan.todo.append(f"{setting}: {why}")


class _DatasetReader:
    """Reads one dataset: a file or a name, and the steps that change it."""

    def __init__(self, scope: Scope, plan: Plan, setting: str) -> None:
        self.scope, self.plan, self.setting = scope, plan, setting
        self.split: str | None = None

    def read(self, node: ast.expr) -> object:
        """Return a file or a dataset's name. Raises UnknownValueError where it is another thing."""
        node = self.scope.follow(node)
        if isinstance(node, ast.Subscript):
            split = self.scope.evaluate(node.slice)
            self.split = str(split) if isinstance(split, str) else self.split
            return self.read(node.value)
        if not isinstance(node, ast.Call):
            raise UnknownValueError(node)
        if ast.unparse(node.func).rpartition(".")[2] == "load_dataset":
            return self._read_load(node)
        if isinstance(node.func, ast.Attribute):
            return self._read_step(node, node.func)
        raise UnknownValueError(node)

    def _read_step(self, call: ast.Call, function: ast.Attribute) -> object:
        if function.attr == "rename_column" and len(call.args) == 2:
            old, new = (self.scope.evaluate(a) for a in call.args)
            if new not in ("prompt", "solution"):
                raise UnknownValueError(call)
            self.plan.set(f"env.{new}_column", old, f"line {call.lineno}: rename_column")
        elif function.attr == "train_test_split":
            self.plan.notes.append(f"line {call.lineno}: train_test_split: the last tenth of the rows is held out here")
            self.split = None
        elif function.attr not in _OF_NO_CONSEQUENCE:
            raise UnknownValueError(call)
        return self.read(function.value)

    def _read_load(self, call: ast.Call) -> object:
        given = {k: self.scope.evaluate(v) for k, v in self.scope.list_items(call)}
        path = self.scope.evaluate(call.args[0]) if call.args else given.pop("path", None)
        config = self.scope.evaluate(call.args[1]) if len(call.args) > 1 else given.pop("name", None)
        split = given.pop("split", None) or self.split
        files, revision, streaming = (given.pop(n, None) for n in ("data_files", "revision", "streaming"))
        if not isinstance(path, str) or given.keys() - {"token", "trust_remote_code", "num_proc"}:
            raise UnknownValueError(call)
        file = _find_file(files, split) if path in ("json", "parquet") and not config else None
        if self.setting == "env.test_data":
            if file is None:
                self.plan.set("env.test_split", split or "test", "eval_dataset")
            return file
        for name, value in (("streaming", streaming or None), ("revision", revision)):
            if value is not None:
                self.plan.set(f"env.{name}", value, "load_dataset")
        if file is None:
            for name, value in (("data_files", files), ("split", None if split == "train" else split)):
                if value is not None:
                    self.plan.set(f"env.{name}", value, "load_dataset")
        return file or (f"{path}:{config}" if config else path)


def _find_file(files: object, split: object) -> str | None:
    """Return the one file that a split is; None where it is several, a part of one, or of another format."""
    files = files.get(str(split or "train")) if isinstance(files, Mapping) else files
    files = files[0] if isinstance(files, list) and len(files) == 1 else files
    whole = split is None or str(split).isalpha()
    return files if whole and isinstance(files, str) and files.endswith(_FILES) and "*" not in files else None
