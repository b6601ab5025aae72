"""``agentrl env``: environments that are installed in venvs of their own, such as verifiers packages."""

from __future__ import annotations

from agentrl.cli.arguments import Arguments, Command, NoOptions
from agentrl.errors import UserError
from agentrl_envs.verifiers_venvs import add_package, list_packages, remove_package

TEXT = """\
  agentrl env add verifiers:./my_package     # a folder, a wheel, or the name of a package on the index
  agentrl train --env verifiers:my-package
  agentrl env list
  agentrl env remove verifiers:my-package

Makes a venv for a package that was written for the library verifiers, with verifiers in it, below XDG_DATA_HOME. A
folder goes on being read where it lies: what you change there is in the next run.
"""
_FAMILY = "verifiers:"


def _run(arguments: Arguments[NoOptions]) -> int:
    match arguments.names:
        case ["add", *sources] if sources:
            for package in [add_package(_strip_family(source)) for source in sources]:
                print(f"agentrl train --env verifiers:{package.name}")
        case ["list"]:
            for package in list_packages():
                print(f"verifiers:{package.name}  verifiers {package.verifiers}, from {package.source}")
        case ["remove", *names] if names:
            for name in names:
                remove_package(_strip_family(name))
        case _:
            raise main.refuse(arguments.names, "; the first word is add, list or remove")
    return 0


def _strip_family(name: str) -> str:
    if not name.startswith(_FAMILY) or name == _FAMILY:
        raise UserError(f"{name!r} is no environment that is installed so; say verifiers:NAME, or verifiers:FOLDER")
    return name.removeprefix(_FAMILY)


main = Command(
    "env",
    "add|list|remove [verifiers:NAME ...]",
    TEXT,
    _run,
    NoOptions,
    names=(1, None),
    summary="install environments in venvs of their own",
)
