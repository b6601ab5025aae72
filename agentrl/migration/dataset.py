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
        plan.set(setting, _DatasetReader(scope, plan, setting).read(node), reason)
    except UnknownValueError as error:
        _leave(plan, setting, f"line {error.line}: the dataset is made by {error}, which is not run: {_SAVE} {setting}")


def _leave(plan: Plan, setting: str, why: str) -> None:
    plan.set(setting, f"{UNKNOWN}.jsonl", "")
    plan.todo.append(f"{setting}: {why}")


class _DatasetReader:
    """Reads one dataset: a file or a name, and the steps that change it."""

    def __init__(self, scope: Scope, plan: Plan, setting: str) -> None:
        self.scope, self.plan, self.setting = scope, plan, setting
        self.split = "train"

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
            if new != "prompt":
                raise UnknownValueError(call)
            self.plan.set("env.prompt_column", old, f"line {call.lineno}: rename_column")
        elif function.attr == "train_test_split":
            self.plan.notes.append(f"line {call.lineno}: train_test_split: the last tenth of the rows is held out here")
        elif function.attr not in _OF_NO_CONSEQUENCE:
            raise UnknownValueError(call)
        return self.read(function.value)

    def _read_load(self, call: ast.Call) -> object:
        given = {k: self.scope.evaluate(v) for k, v in self.scope.list_items(call)}
        path = self.scope.evaluate(call.args[0]) if call.args else given.pop("path", None)
        config = self.scope.evaluate(call.args[1]) if len(call.args) > 1 else given.pop("name", None)
        split = given.get("split", self.split)
        if path in ("json", "parquet"):
            return self._read_files(call, given.get("data_files"), split)
        if not isinstance(path, str) or given.keys() - {"split", "token", "trust_remote_code", "num_proc"}:
            raise UnknownValueError(call)
        if split != ("train" if self.setting == "env.data" else "test"):
            raise UnknownValueError(call)
        return f"{path}:{config}" if config else path

    def _read_files(self, call: ast.Call, files: object, split: object) -> object:
        files = files.get(str(split)) if isinstance(files, Mapping) else files
        files = files[0] if isinstance(files, list) and len(files) == 1 else files
        whole = split is None or str(split).isalpha()
        if not isinstance(files, str) or not files.endswith(_FILES) or not whole:
            raise UnknownValueError(call)
        return files
