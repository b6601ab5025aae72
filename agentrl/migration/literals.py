"""The values of Python expressions, as far as they can be known without running anything."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_BINARY: Mapping[type[ast.operator], Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_LARGEST = 1e6  # of a factor or an exponent's base, so that reading a script takes no time
_SAME = {"str", "int", "float", "bool", "list", "tuple", "Path", "SchedulerType", "IntervalStrategy"}


class UnknownValueError(Exception):
    """A value that is known only once the script runs; its text is the expression."""

    def __init__(self, node: ast.AST) -> None:
        super().__init__(ast.unparse(node))
        self.line = getattr(node, "lineno", 0)


@dataclass(frozen=True)
class _Binding:
    """A name bound in a script: the line, and the expression; None where the script decides as it runs."""

    line: int
    value: ast.expr | None


class Scope:
    """The names that a script binds at its top level and in the functions around one line, and their values."""

    def __init__(self, tree: ast.Module, around: Sequence[ast.FunctionDef | ast.AsyncFunctionDef] = ()) -> None:
        self.bindings: dict[str, list[_Binding]] = {}
        self._defaults = dict(_read_defaults(tree))
        for body in (tree.body, *(f.body for f in around)):
            for name, binding in _bind(body, sure=True):
                self.bindings.setdefault(name, []).append(binding)

    def find(self, name: str, before: int) -> ast.expr | None:
        """Return the expression that a name is bound to at a line; None where it is not known."""
        earlier = [b for b in self.bindings.get(name, ()) if b.line < before]
        return max(earlier, key=lambda b: b.line).value if earlier else None

    def follow(self, node: ast.expr) -> ast.expr:
        """Return the expression behind a name, and behind that one; the expression itself where it is no name."""
        for _ in range(20):
            found = self.find(node.id, node.lineno) if isinstance(node, ast.Name) else None
            if found is None:
                break
            node = found
        return node

    def evaluate(self, node: ast.expr) -> object:
        """Return the value of an expression.

        Raises:
            UnknownValueError: it is known only once the script runs.
        """
        try:
            return self._evaluate(node)
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError):
            raise UnknownValueError(node) from None

    def _evaluate(self, node: ast.expr) -> object:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name | ast.Attribute):
            return self._evaluate_name(node)
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self._evaluate(item) for item in node.elts]
        if isinstance(node, ast.Dict):
            return {str(k): self._evaluate(v) for k, v in self.list_items(node)}
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self._evaluate(part)) for part in node.values)
        if isinstance(node, ast.FormattedValue) and node.format_spec is None:
            return self._evaluate(node.value)
        if isinstance(node, ast.UnaryOp | ast.BinOp):
            return self._compute(node)
        if isinstance(node, ast.Subscript):
            container = self._evaluate(node.value)
            return container[self._evaluate(node.slice)]  # type: ignore[index]
        if isinstance(node, ast.Call):
            return self._evaluate_call(node)
        raise UnknownValueError(node)

    def _evaluate_name(self, node: ast.Name | ast.Attribute) -> object:
        if isinstance(node, ast.Name):
            bound = self.find(node.id, node.lineno)
            if bound is None:
                raise UnknownValueError(node)
            return self._evaluate(bound)
        if node.attr in self._defaults and isinstance(node.value, ast.Name):
            return self._evaluate(self._defaults[node.attr])  # args.lr, of parser.add_argument("--lr", default=...)
        if isinstance(node.value, ast.Name) and node.value.id in {"torch", *_SAME}:
            return node.attr.lower()  # torch.bfloat16, SchedulerType.COSINE
        raise UnknownValueError(node)

    def _compute(self, node: ast.UnaryOp | ast.BinOp) -> object:
        if isinstance(node, ast.UnaryOp):
            value = self._evaluate(node.operand)
            if isinstance(node.op, ast.Not):
                return not value
            if isinstance(node.op, ast.USub) and isinstance(value, int | float):
                return -value
            raise UnknownValueError(node)
        left, right = self._evaluate(node.left), self._evaluate(node.right)
        texts = isinstance(left, str) and isinstance(right, str)
        if isinstance(node.op, ast.Div) and texts:
            return f"{left}/{right}"  # of two paths
        if not texts and any(not isinstance(v, int | float) or abs(v) > _LARGEST for v in (left, right)):
            raise UnknownValueError(node)
        if isinstance(node.op, ast.Pow) and isinstance(right, int | float) and abs(right) > 64:
            raise UnknownValueError(node)
        return _BINARY[type(node.op)](left, right)

    def _evaluate_call(self, node: ast.Call) -> object:
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        if last == "dict" and not node.args:
            return {str(k): self._evaluate(v) for k, v in self.list_items(node)}
        if name in ("os.getenv", "os.environ.get") and len(node.args) == 2:
            return self._evaluate(node.args[1])
        if name == "os.path.join" and node.args:
            return "/".join(str(self._evaluate(a)) for a in node.args)
        if last in _SAME and len(node.args) == 1 and not node.keywords:
            return self._evaluate(node.args[0])
        if last in ("LoraConfig", "BitsAndBytesConfig") and not node.args:
            return {str(k): self._evaluate(v) for k, v in self.list_items(node)}
        raise UnknownValueError(node)

    def list_items(self, node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
        """Yield name and expression of each keyword or entry of a call or a dict, those behind ``**`` too.

        Raises:
            UnknownValueError: what is behind ``**`` is known only once the script runs.
        """
        node = self.follow(node)
        if isinstance(node, ast.Dict):
            pairs = [(k, v) for k, v in zip(node.keys, node.values, strict=True)]
        elif isinstance(node, ast.Call):
            pairs = [(ast.Constant(k.arg) if k.arg else None, k.value) for k in node.keywords]
        else:
            raise UnknownValueError(node)
        for key, value in pairs:
            if key is None:
                yield from self.list_items(value)
            else:
                yield str(self._evaluate(key)), value


def _bind(body: Sequence[ast.stmt], sure: bool) -> Iterator[tuple[str, _Binding]]:
    """Yield what statements bind; where only some runs come by, the value is not known."""
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            known = sure and not isinstance(node, ast.AugAssign)
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name) and not isinstance(target, ast.Attribute | ast.Subscript):
                        yield name.id, _Binding(node.lineno, node.value if known and name is target else None)
        elif isinstance(node, ast.If):
            is_guard = is_main_guard(node)
            yield from _bind(node.body, sure and is_guard)
            yield from _bind(node.orelse, sure=False)
        elif isinstance(node, ast.With | ast.Try):
            yield from _bind(node.body, sure)
        elif isinstance(node, ast.For | ast.While):
            yield from _bind(node.body, sure=False)


def is_main_guard(node: ast.stmt) -> bool:
    """Return True for ``if __name__ == "__main__":``."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _read_defaults(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the defaults of argparse's options and of the fields of the script's own dataclasses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
            flags = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            options = {k.arg: k.value for k in node.keywords}
            named = options.get("dest")
            long = [f for f in flags if f.startswith("--")] or flags
            name = named.value if isinstance(named, ast.Constant) else (long or [""])[0].lstrip("-").replace("-", "_")
            if "default" in options:
                yield str(name), options["default"]
            elif isinstance(action := options.get("action"), ast.Constant) and action.value == "store_true":
                yield str(name), ast.Constant(False)
        elif isinstance(node, ast.ClassDef) and "dataclass" in " ".join(map(ast.unparse, node.decorator_list)):
            yield from _read_fields(node)


def _read_fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None:
            value = line.value
            if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
                given = [k.value for k in value.keywords if k.arg == "default"]
                if not given:
                    continue
                value = given[0]
            yield line.target.id, value
