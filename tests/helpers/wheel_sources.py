"""The source of a package, as it is installed or in its wheel on the package index, read without running it.

Of a wheel only the parts with Python files are fetched, by ranges of bytes; where it lies is asked of pip.
"""

from __future__ import annotations

import ast
import io
import json
import ssl
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

Function = ast.FunctionDef | ast.AsyncFunctionDef
PART = 1 << 20  # bytes in one request


@dataclass
class Sources:
    """The modules of a package, by their dotted names."""

    package: str
    version: str
    files: dict[str, str]
    requires: tuple[str, ...] = ()
    _trees: dict[str, ast.Module] = field(default_factory=dict)

    def tree(self, module: str) -> ast.Module | None:
        """Parse a module; None if there is none."""
        if module not in self._trees and module in self.files:
            self._trees[module] = ast.parse(self.files[module])
        return self._trees.get(module)

    def find(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> tuple[str, ast.AST] | None:
        """Find where a module's name is defined: the module and the definition; None if it is not."""
        key = f"{module}:{name}"
        if (tree := self.tree(module)) is None or key in seen:
            return None
        found: tuple[str, ast.AST] | None = None
        for node in _statements(tree):
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _assigned(node):
                found = module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        origin = self._absolute(module, node)
                        whole = self.tree(f"{origin}.{alias.name}")
                        imported = self.find(origin, alias.name, seen | {key})
                        found = imported or ((f"{origin}.{alias.name}", whole) if whole else found)
        return found or self._find_lazy(module, name, tree, seen | {key})

    def find_class(self, dotted: str) -> tuple[str, ast.ClassDef]:
        """Find a class.

        Raises:
            AssertionError: there is none.
        """
        module, _, name = dotted.rpartition(".")
        found = self.find(module, name)
        assert found is not None, f"{self.package} {self.version} has no {dotted}"
        assert isinstance(found[1], ast.ClassDef), f"{self.package} {self.version}: {dotted} is no class"
        return found[0], found[1]

    def bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield a class, and those of its bases that the package has."""
        yield module, node
        for base in node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            found = self.find(module, plain.id) if isinstance(plain, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef) and found[1] is not node:
                yield from self.bases(found[0], found[1])

    def members(self, dotted: str) -> dict[str, ast.AST]:
        """List what a class has: methods, fields, and what its methods set."""
        found: dict[str, ast.AST] = {}
        for _, node in self.bases(*self.find_class(dotted)):
            for part in ast.walk(node):
                if isinstance(part, Function) and part in node.body:
                    found.setdefault(part.name, part)
                elif isinstance(part, ast.Assign | ast.AnnAssign):
                    for name in _assigned(part):
                        found.setdefault(name, part)
        return found

    def fields(self, dotted: str) -> set[str]:
        """List the fields of a dataclass, a struct or a model: the words it can be built with."""
        return {
            part.target.id
            for _, node in self.bases(*self.find_class(dotted))
            for part in node.body
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        }

    def _find_lazy(self, module: str, name: str, tree: ast.Module, seen: frozenset[str]) -> tuple[str, ast.AST] | None:
        """Find a name that a module imports on demand, by a table of ``"Name": ".module:Name"``."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
                        place, _, word = str(value.value).partition(":")
                        if place.startswith(".") and word:
                            return self.find(f"{self.package}{place}", word, seen)
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        is_package = any(name.startswith(f"{module}.") for name in self.files)
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield a module's statements, those under ``if`` and ``try`` too."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                waiting.append(node)
            if isinstance(node, ast.stmt):
                yield node


def _assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    flat = [part for t in targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])]
    names = [t.id for t in flat if isinstance(t, ast.Name)]
    return names + [t.attr for t in flat if isinstance(t, ast.Attribute)]


def describe_misfit(function: Function, positional: int, keywords: set[str], *, bound: bool) -> str:
    """Say why a function cannot be called so; nothing if it can."""
    a = function.args
    plain = [arg.arg for arg in (*a.posonlyargs, *a.args)][bound:]
    named = {*plain, *(arg.arg for arg in a.kwonlyargs)}
    if (unknown := keywords - named) and a.kwarg is None:
        return f"takes no {', '.join(sorted(unknown))}"
    if positional > len(plain) and a.vararg is None:
        return f"takes {len(plain)} positional arguments, not {positional}"
    needed = plain[: len(plain) - len(a.defaults)][positional:]
    needed += [arg.arg for arg, value in zip(a.kwonlyargs, a.kw_defaults, strict=True) if value is None]
    if missing := set(needed) - keywords:
        return f"wants {', '.join(sorted(missing))} too"
    return ""


def read_installed(package: str) -> Sources:
    """Read a package that is installed here; skip the test if it is not."""
    import importlib.util

    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    root = Path(spec.origin).parent
    files = {_module(str(path.relative_to(root.parent))): path.read_text() for path in root.rglob("*.py")}
    distributions = importlib.metadata.packages_distributions()[package]
    distribution = importlib.metadata.distribution(distributions[0])
    return Sources(package, distribution.version, files, tuple(distribution.requires or ()))


def read_wheel(package: str, version: str) -> Sources:
    """Read a package's wheel on the index; skip the test, and say why, if the index does not give it."""
    words = ["-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-"]
    asked = subprocess.run(
        [sys.executable, *words, f"{package}=={version}"], capture_output=True, text=True, timeout=300, check=False
    )
    if asked.returncode:
        pytest.skip(f"pip finds no {package} {version}: {asked.stderr.strip().splitlines()[-1:]}")
    url = json.loads(asked.stdout)["install"][0]["download_info"]["url"]
    try:
        with _RemoteFile(url) as remote, zipfile.ZipFile(_buffer(remote)) as wheel:
            return _read_files(package, version, wheel)
    except httpx2.HTTPError as error:
        pytest.skip(f"the index does not give parts of the wheel of {package} {version}: {error!r}")


def _read_files(package: str, version: str, wheel: zipfile.ZipFile) -> Sources:
    infos = sorted(wheel.infolist(), key=lambda info: info.header_offset)
    texts = {
        info.filename: wheel.read(info).decode()
        for info in infos
        if info.filename.startswith(f"{package}/") and info.filename.endswith(".py")
    }
    metadata = next(wheel.read(info).decode() for info in infos if info.filename.endswith(".dist-info/METADATA"))
    requires = [line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    return Sources(package, version, {_module(name): text for name, text in texts.items()}, tuple(requires))


def _buffer(file: io.RawIOBase) -> io.BufferedReader:
    return io.BufferedReader(file, 1 << 16)


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


class _RemoteFile(io.RawIOBase):
    """A file behind HTTP, of which only the parts that are read are fetched."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._http = httpx2.Client(verify=ssl.create_default_context(), follow_redirects=True, timeout=60)
        self._url, self._at, self._parts = url, 0, dict[int, bytes]()
        whole = self._fetch(0, 0).headers["content-range"].rpartition("/")[2]
        self._size = int(whole)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        if self._at >= self._size:
            return 0
        part, start = divmod(self._at, PART)
        if part not in self._parts:
            self._parts[part] = self._fetch(part * PART, min((part + 1) * PART, self._size) - 1).content
        data = self._parts[part][start : start + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._http.close()
        super().close()

    def _fetch(self, first: int, last: int) -> httpx2.Response:
        response = self._http.get(self._url, headers={"Range": f"bytes={first}-{last}"})
        if response.status_code != 206:
            raise httpx2.HTTPError(f"status {response.status_code}, not a part")
        return response
