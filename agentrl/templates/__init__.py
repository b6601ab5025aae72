"""A package of one's own, with an environment or a tool in it: it installs, registers, and passes its tests."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template
from typing import Literal

from agentrl import registry
from agentrl.errors import UserError

Kind = Literal["env", "tool"]
TEMPLATES = Path(__file__).parent


def write(kind: Kind, name: str, out: Path | None = None) -> Path:
    """Write the package ``agentrl-NAME``; where it is.

    Args:
        name: what it is registered as: lower-case letters, digits and hyphens.
        out: the folder, which is not there yet; ``agentrl-NAME`` in the working folder by default.

    Raises:
        UserError: the name or the folder is no good, or taken.
    """
    check_name(kind, name)
    folder = out or Path(f"agentrl-{name}")
    if folder.exists():
        raise UserError(f"{str(folder)!r} exists; say --out DIR for another folder")
    words = _words(kind, name)
    try:
        for template in sorted(p for root in ("both", kind) for p in (TEMPLATES / root).rglob("*.tmpl")):
            path = folder / _place(template, words["package"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(Template(template.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {str(folder)!r}: {error.strerror}") from None
    return folder


def check_name(kind: Kind, name: str) -> None:
    """Raises UserError for what cannot be the name of a new environment or tool."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise UserError(f"{name!r} is no name: lower-case letters, digits and hyphens, such as my-{kind}")
    words = _words(kind, name)
    if keyword.iskeyword(words["function"]) or words["attribute"].startswith("Test"):
        raise UserError(f"{name!r} is a word of Python's or pytest's own; take another, such as my-{name}")
    written = "".join(p.read_text(encoding="utf-8") for p in (TEMPLATES / kind).rglob("*.py.tmpl"))
    if re.search(rf"(?<!\$)\b{words['attribute']}\b", written):
        raise UserError(f"{name!r} is a name that the package's own code needs; take another, such as my-{name}")
    if name in registry.available(kind):
        raise UserError(f"there is {'an' if kind == 'env' else 'a'} {kind} {name!r} already; take another name")


def _words(kind: Kind, name: str) -> dict[str, str]:
    """What stands in the templates for ``$word``."""
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


def _place(template: Path, package: str) -> Path:
    """Where a template's file goes: ``dot.gitignore.tmpl`` is ``.gitignore``, ``PACKAGE`` the package's name."""
    parts = template.relative_to(TEMPLATES).with_suffix("").parts[1:]
    return Path(*(p.removeprefix("dot").replace("PACKAGE", package) for p in parts))
