"""Templates of a package with an environment or a tool: it installs, registers, and passes its tests."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template
from typing import Literal

from agentrl.errors import UserError
from agentrl.settings import registry

TemplateKind = Literal["env", "tool"]
TEMPLATES = Path(__file__).parent


def write_package(kind: TemplateKind, name: str, out: Path | None = None) -> Path:
    """Write the package ``agentrl-NAME`` and return its folder.

    Args:
        name: what it is registered as: lower-case letters, digits and hyphens.
        out: the folder, which is not there yet; ``agentrl-NAME`` in the working folder by default.

    Raises:
        UserError: the name or the folder is no good, or taken.
    """
    check_package_name(kind, name)
    folder = out or Path(f"agentrl-{name}")
    if folder.exists():
        raise UserError(f"{str(folder)!r} exists; say --out DIR for another folder")
    words = _words(kind, name)
    try:
        for template in sorted(p for root in ("both", kind) for p in (TEMPLATES / root).rglob("*.tmpl")):
            path = folder / _build_path(template, words["package"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(Template(template.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {str(folder)!r}: {error.strerror}") from None
    return folder


def check_package_name(kind: TemplateKind, name: str) -> None:
    """Raise UserError for what cannot be the name of a new environment or tool."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UserError(f"{name!r} is no name: lower-case letters, digits and hyphens, such as my-{kind}")
    words = _words(kind, name)
    if keyword.iskeyword(words["function"]) or words["attribute"].startswith("Test"):
        raise UserError(f"{name!r} is a word of Python's or pytest's own; take another, such as my-{name}")
    written = "".join(p.read_text(encoding="utf-8") for p in (TEMPLATES / kind).rglob("*.py.tmpl"))
    if re.search(rf"(?<!\$)\b{words['attribute']}\b", written):
        raise UserError(f"{name!r} is a name that the package's own code needs; take another, such as my-{name}")
    if name in registry.list_registered(kind):
        raise UserError(f"there is {'an' if kind == 'env' else 'a'} {kind} {name!r} already; take another name")


def _words(kind: TemplateKind, name: str) -> dict[str, str]:
    """Return the text for each ``$word`` of the templates."""
    function = name.replace("-", "_")
    return {
        "kind": kind,
        "name": name,
        "distribution": f"agentrl-{name}",
        "package": f"agentrl_{function}",
        "function": function,
        "Class": "".join(part.capitalize() for part in name.split("-")),
        "attribute": "".join(part.capitalize() for part in name.split("-")) if kind == "env" else function,
    }


def _build_path(template: Path, package: str) -> Path:
    """Return the path a template's file gets: ``dot.gitignore.tmpl`` is ``.gitignore``, ``PACKAGE`` the name."""
    parts = template.relative_to(TEMPLATES).with_suffix("").parts[1:]
    return Path(*(p.removeprefix("dot").replace("PACKAGE", package) for p in parts))
