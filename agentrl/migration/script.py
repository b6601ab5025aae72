"""A script that makes a ``GRPOTrainer``, read without being run."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.errors import UserError
from agentrl.migration.config_files import read_config_file, read_deepspeed
from agentrl.migration.dataset import read_dataset
from agentrl.migration.functions import read_rewards, read_tools, starts_training
from agentrl.migration.literals import Scope, UnknownValueError
from agentrl.migration.plan import Plan
from agentrl.settings.names.translation import find_name

LARGEST = 2_000_000  # bytes of a script
_POSITIONAL = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
_WAY_OUT = {
    "environment_factory": "an environment is a class here: agentrl new env NAME, docs/write-an-environment.md",
    "rollout_func": "the rollout is agentrl's own, over an environment of yours: docs/write-an-environment.md",
    "reward_processing_classes": "a reward model's tokenizer is loaded by its name",
}
_IN_PYTHON = ("callbacks", "optimizers")
_FROM_PARSER = (
    "the fields of GRPOConfig come from the command line: give them to agentrl train, whose names they may keep "
    "(agentrl train FILE.toml --num_generations 8), or give agentrl from-trl the YAML that the script is given"
)


def read_script(path: Path) -> Plan:
    """Read a training script.

    Raises:
        UserError: it is no Python, or makes no GRPOTrainer.
    """
    tree = _parse(path)
    call, around = _find_trainer(tree, path)
    plan = Plan(str(path))
    reader = _ScriptReader(tree, Scope(tree, around), plan, path)
    reader.read(call)
    if plan.functions and (line := starts_training(tree, call)):
        plan.todo.append(
            f"importing {path} for its functions would start the training of line {line}: agentrl from-trl {path} "
            "--functions FILE.py writes them into a file of their own (or put the rest under "
            'if __name__ == "__main__":)'
        )
    return plan


def _parse(path: Path) -> ast.Module:
    if path.stat().st_size > LARGEST:
        raise UserError(f"{path} is no script: it has {path.stat().st_size:,} bytes, over {LARGEST:,}")
    try:
        with tokenize.open(path) as file:
            return ast.parse(file.read(), str(path))
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        raise UserError(f"{path}{where} is no Python 3: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path} is no Python 3: {error or type(error).__name__}") from None


def _find_trainer(tree: ast.Module, path: Path) -> tuple[ast.Call, Sequence[ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Return the call that makes the trainer, and the functions around it, the outermost first."""
    names = {"GRPOTrainer", *_list_aliases(tree, "GRPOTrainer"), *_list_subclasses(tree)}
    found = list(_find_calls(tree.body, names, ()))
    if found:
        return found[0]
    others = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("Trainer")]
    if others:
        raise UserError(
            f"{path}, line {others[0].lineno} makes a {ast.unparse(others[0].func)}; agentrl trains as GRPOTrainer does"
        )
    raise UserError(f"{path} makes no GRPOTrainer; agentrl from-trl reads a script that does, or its YAML")


def _list_aliases(tree: ast.Module, name: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname for alias in node.names if alias.name == name and alias.asname)


def _list_subclasses(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(b).endswith("GRPOTrainer") for b in node.bases):
            yield node.name


def _find_calls(
    body: Sequence[ast.AST], names: set[str], around: tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]
) -> Iterator[tuple[ast.Call, tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]]]:
    for node in body:
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in names:
            yield node, around
        inner = (*around, node) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else around
        if not isinstance(node, ast.ClassDef):
            yield from _find_calls(list(ast.iter_child_nodes(node)), names, inner)


class _ScriptReader:
    """The arguments of one trainer, as a plan."""

    def __init__(self, tree: ast.Module, scope: Scope, plan: Plan, path: Path) -> None:
        self.tree, self.scope, self.plan, self.path = tree, scope, plan, path

    def read(self, call: ast.Call) -> None:
        arguments = dict(zip(_POSITIONAL, call.args, strict=False)) | dict(self._list_keywords(call))
        if (name := ast.unparse(call.func).rpartition(".")[2]) in _list_subclasses(self.tree):
            self.plan.todo.append(f"{name} overrides methods of GRPOTrainer; these are not taken over (docs/extend.md)")
        self._read_model(arguments.pop("model", None))
        self._read_config(arguments.pop("args", None), call)
        self.plan.set("env.name", "prompts", "a dataset with reward functions")
        read_dataset(self.scope, arguments.pop("train_dataset", None), self.plan, "env.data")
        if (held_out := arguments.pop("eval_dataset", None)) is not None:
            read_dataset(self.scope, held_out, self.plan, "env.test_data")
        read_rewards(self.tree, self.scope, arguments.pop("reward_funcs", None), self.plan, self.path)
        read_tools(self.tree, self.scope, arguments.pop("tools", None), self.plan, self.path)
        for name in ("peft_config", "quantization_config"):
            self._read_table(name, arguments.pop(name, None))
        for name, node in arguments.items():
            self._read_other(name, node)

    def _list_keywords(self, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        try:
            yield from self.scope.list_items(call)
        except UnknownValueError as error:
            self.plan.todo.append(f"line {call.lineno}: **{error} is known only once the script runs; it is left out")
            yield from ((k.arg, k.value) for k in call.keywords if k.arg)

    def _read_model(self, node: ast.expr | None) -> None:
        if node is None:
            return self._unknown("model", "the trainer has no model")
        node = self.scope.follow(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("get_peft_model") and len(node.args) > 1:
            self._read_table("peft_config", node.args[1])
            node = self.scope.follow(node.args[0])
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("from_pretrained"):
            given = dict(self._list_keywords(node))
            name = (
                node.args[0] if node.args else given.pop("pretrained_model_name_or_path", given.pop("model_name", None))
            )
            for key, value in given.items():
                self._read_value({"dtype": "torch_dtype", "revision": "model_revision"}.get(key, key), value)
            return self._read_model(name)
        try:
            self.plan.set("model", self.scope.evaluate(node), "the trainer's model")
        except UnknownValueError as error:
            self._unknown("model", f"line {error.line}: {error} is known only once the script runs")

    def _read_config(self, node: ast.expr | None, call: ast.Call) -> None:
        """Read the call of GRPOConfig, and what is assigned to its fields after it."""
        if node is None or (isinstance(node, ast.Constant) and node.value is None):
            return
        config = self.scope.follow(node)
        if not (isinstance(config, ast.Call) and ast.unparse(config.func).endswith("Config")):
            self.plan.todo.append(f"line {node.lineno}: {_FROM_PARSER}")
        else:
            if config.args:
                self._read_value("output_dir", config.args[0])
            for name, value in self._list_keywords(config):
                self._read_value(name, value)
        if isinstance(node, ast.Name):
            for name, value in self._list_changes(node.id, call.lineno):
                self._read_value(name, value)

    def _list_changes(self, config: str, before: int) -> Iterator[tuple[str, ast.expr]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and node.lineno < before and isinstance(node.targets[0], ast.Attribute):
                target = node.targets[0]
                if isinstance(target.value, ast.Name) and target.value.id == config:
                    yield target.attr, node.value

    def _read_value(self, name: str, node: ast.expr) -> None:
        if find_name(name) is None:
            self.plan.todo.append(f"line {node.lineno}: {name}: TRL 1.16 has no such name, nor has agentrl")
            return
        try:
            value = self.scope.evaluate(node)
            if name != "deepspeed" or not self._read_deepspeed(value):
                self.plan.values[name] = value
        except UnknownValueError as error:
            self.plan.todo.append(
                f"line {error.line}: {name} = {error} is known only once the script runs; set it here"
            )

    def _read_deepspeed(self, value: object) -> bool:
        """Add DeepSpeed's own configuration, a table or a file beside the script; return False where it is neither."""
        if isinstance(value, dict):
            read_deepspeed(value, self.plan)
            return True
        files = [Path(str(value)), self.path.parent / str(value)]
        if found := next((f for f in files if f.is_file()), None):
            read_config_file(found, self.plan)
        return found is not None

    def _read_table(self, name: str, node: ast.expr | None) -> None:
        if node is None:
            return
        try:
            value = self.scope.evaluate(node)
        except UnknownValueError as error:
            self.plan.todo.append(f"line {error.line}: {name} = {error} is known only once the script runs: lora.rank")
            return
        if name == "peft_config" and isinstance(value, dict):  # peft's own defaults
            value = {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **value}
        self.plan.values[name] = value

    def _read_other(self, name: str, node: ast.expr) -> None:
        if isinstance(node, ast.Constant) and node.value is None:
            return
        if name in _WAY_OUT:
            self.plan.todo.append(f"line {node.lineno}: {name}: {_WAY_OUT[name]}")
        elif name in _IN_PYTHON:
            self.plan.todo.append(f"line {node.lineno}: {name} are for Python: agentrl.train(..., {name}=...)")
        elif name == "processing_class":
            self.plan.notes.append(
                "processing_class: the tokenizer is the model's own; chat_template gives another template"
            )
        else:
            self.plan.notes.append(f"line {node.lineno}: {name} has no counterpart")

    def _unknown(self, setting: str, why: str) -> None:
        self.plan.set(setting, "./TODO", "")
        self.plan.todo.append(f"{setting}: {why}")
