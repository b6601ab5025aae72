"""Venvs of verifiers packages: verifiers once, and for each package a venv of its own over that.

verifiers pins versions that agentrl's own venv must not have, and packages may disagree with each other.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from agentrl import UserError
from agentrl.errors import suggest
from agentrl.settings.user_folders import locate_data_folder

VERIFIERS = "0.4.0"
_ABOUT = "agentrl.json"  # written last: a venv without it was not finished
_NEWEST = (3, 14)  # of Python that verifiers takes


@dataclass(frozen=True)
class VerifiersPackage:
    """A package that was added.

    Args:
        name: as ``--env verifiers:NAME`` has it, and verifiers the taskset.
        source: that it was installed from.
        verifiers: the version beside it.
    """

    name: str
    source: str
    verifiers: str

    @property
    def python(self) -> Path:
        """Return the interpreter of its venv."""
        return _locate_python(_locate_folder() / self.name)


def add_package(source: str, say: Callable[[str], None] = print) -> VerifiersPackage:
    """Install a package in a venv of its own, over one that has verifiers; one of that name before it is replaced.

    Args:
        source: a folder, which goes on being read where it lies; a wheel; or a requirement such as ``wordle==0.1``.
        say: is told what takes time.

    Raises:
        UserError: it cannot be installed, and why.
    """
    name, target = _read_source(source)
    if sys.version_info[:2] > _NEWEST:
        raise UserError(
            f"verifiers {VERIFIERS} takes Python up to {_NEWEST[0]}.{_NEWEST[1]}; this is {sys.version[:6]}"
        )
    with _hold_folder():
        base = _locate_folder() / f".verifiers-{VERIFIERS}-python{sys.version_info[0]}.{sys.version_info[1]}"
        if not (base / _ABOUT).is_file():
            say(f"verifiers {VERIFIERS} is installed, once: 600 MB, about a minute")
            _make_venv(base)
            _install(base, base, [f"verifiers=={VERIFIERS}"])
            (base / _ABOUT).write_text("{}\n")
        folder = _locate_folder() / name
        say(f"{name} is installed")
        _make_venv(folder, "--without-pip")
        packages = {f: next(f.glob("lib/python*/site-packages")) for f in (base, folder)}
        (packages[folder] / "over_verifiers.pth").write_text(f"{packages[base]}\n")
        _install(base, folder, [f"verifiers=={VERIFIERS}", *target])
        package = VerifiersPackage(name, source if source == name else _describe_source(source), VERIFIERS)
        (folder / _ABOUT).write_text(json.dumps(asdict(package)) + "\n")
        return package


def find_package(name: str) -> VerifiersPackage:
    """Find a package that was added. Raises UserError if there is none, or its venv is broken."""
    known = {package.name: package for package in list_packages()}
    package = known.get(canonicalize_name(name))
    if package is None:
        raise UserError(
            f"env 'verifiers:{name}': there is no such package here{suggest(name, known)}. To install it: "
            f"agentrl env add verifiers:{name} (or its folder, or a wheel)"
        )
    if not package.python.exists():
        raise UserError(
            f"env 'verifiers:{name}': its venv has no Python any more ({package.python}). To make it again: "
            f"agentrl env add verifiers:{package.source}"
        )
    return package


def list_packages() -> list[VerifiersPackage]:
    """List the packages that were added, by name."""
    abouts = sorted(_locate_folder().glob(f"[!.]*/{_ABOUT}"))
    return [VerifiersPackage(**json.loads(about.read_text(encoding="utf-8"))) for about in abouts]


def remove_package(name: str) -> None:
    """Remove a package's venv. Raises UserError if there is none."""
    shutil.rmtree(_locate_folder() / find_package(name).name)


def _locate_folder() -> Path:
    folder = locate_data_folder()
    if folder is None:
        raise UserError("there is no home folder to keep verifiers packages in; set XDG_DATA_HOME to a folder")
    return folder / "verifiers"


@contextmanager
def _hold_folder() -> Iterator[None]:
    """Hold the folder of the venvs: who else adds a package waits. Raises UserError: it cannot be written."""
    folder = _locate_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(
            f"verifiers packages are kept in {str(folder)!r}, which cannot be written ({error.strerror}); set "
            "XDG_DATA_HOME to another folder"
        ) from None
    with held as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _locate_python(venv: Path) -> Path:
    return venv / "bin" / "python"


def _describe_source(source: str) -> str:
    return str(Path(source).absolute()) if Path(source).exists() else source


def _read_source(source: str) -> tuple[str, list[str]]:
    """Return the name of the package that a source has, and the words by which pip installs it."""
    path = Path(source)
    if path.is_dir():
        return _read_project_name(path), ["--editable", str(path.absolute())]
    if source.endswith(".whl"):
        if not path.is_file():
            raise UserError(f"env add: there is no wheel {source!r} (from {Path.cwd()})")
        return canonicalize_name(path.name.partition("-")[0]), [str(path.absolute())]
    if "/" in source or source.startswith("."):
        raise UserError(f"env add: there is no folder {source!r} (from {Path.cwd()})")
    try:
        return canonicalize_name(Requirement(source).name), [source]
    except InvalidRequirement as error:
        first = str(error).splitlines()[0]
        raise UserError(f"env add: {source!r} is no folder, no wheel, and no name of a package ({first})") from None


def _read_project_name(folder: Path) -> str:
    try:
        return canonicalize_name(
            tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"env add: {str(folder)!r} is no package: its pyproject.toml has no project.name ({type(error).__name__})"
        ) from None


def _make_venv(folder: Path, *options: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", *options, str(folder)], f"env add: no venv can be made in {str(folder)!r}")


def _install(base: Path, folder: Path, target: Sequence[str]) -> None:
    """Install packages into a venv, by the pip of the venv below it."""
    pip = [str(_locate_python(base)), "-m", "pip", "--python", str(_locate_python(folder)), "install", "--quiet"]
    words = [*pip, "--disable-pip-version-check", "--no-input", *target]
    _run(words, f"env add: {target[-1]!r} cannot be installed")


def _run(words: list[str], refusal: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise UserError(f"{refusal}: {(errors or lines)[-1].removeprefix('ERROR: ')}")
