"""One parser of the words after a verb, for every verb and for a plugin's: names first, then ``--option value``.

A verb declares a `Command`: how many names it takes, its own options as a `Section`, and the settings of a run that it
takes beside them. Help, refusals and "did you mean" come from that declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentrl.errors import ConfigError, UserError, describe_missing_run, suggest
from agentrl.settings.loader import Layer, list_settings, read_overrides, read_toml, set_option, split_options
from agentrl.settings.registry import list_registered
from agentrl.settings.section import Section
from agentrl.settings.signature import list_problems

OptionsT = TypeVar("OptionsT", bound=Section)
HELP_WORDS = {"-h", "--help"}


class NoOptions(Section):
    """The options of a verb that has none."""


@dataclass(frozen=True)
class Arguments(Generic[OptionsT]):
    """The words of one command line, read.

    Args:
        names: the words before the first option, but for the TOML files.
        options: the verb's own.
        files: the TOML files before the first option, in order.
        settings: the settings of a run that the command line gives.
        setting_arguments: the same as they are typed, one a setting.
    """

    names: list[str]
    options: OptionsT
    files: list[Layer]
    settings: Layer
    setting_arguments: tuple[str, ...] = ()

    @property
    def layers(self) -> list[Layer]:
        """Return files and command line as layers for `build_config`; later ones win."""
        return [*self.files, self.settings]


@dataclass(frozen=True)
class Command(Generic[OptionsT]):
    """A verb: what its words are, and what runs it.

    Args:
        verb: the word after ``agentrl``.
        takes: what comes after the verb, for the usage line and for refusals.
        text: the help: examples, then what the verb does.
        run: returns the exit status.
        options: the verb's own options; their descriptions and defaults are its help.
        names: the fewest and the most words before the first option; ``None``: any number. A verb that takes settings
            and no names takes TOML files there.
        settings: the verb takes settings of a run, and shows those in its help for which this returns True; ``None``:
            it takes none.
        footer: the end of the help.
        summary: a few words for the list of verbs.
    """

    verb: str
    takes: str
    text: str
    run: Callable[[Arguments[OptionsT]], int]
    options: type[OptionsT]
    names: tuple[int, int | None] = (0, 0)
    settings: Callable[[str], bool] | None = None
    footer: str = ""
    summary: str = ""

    def __call__(self, words: Sequence[str]) -> int:
        """Run the verb, or print its help, and return the exit status. Raises ConfigError for wrong words."""
        if HELP_WORDS & set(words) or (not words and self._needs_words):
            print(self.format_help())
            return 0
        return self.run(self.parse(words))

    def parse(self, words: Sequence[str]) -> Arguments[OptionsT]:
        """Read the words.

        Raises:
            ConfigError: there are too few or too many names, or an option is unknown, missing or wrong.
        """
        words = self._complete_switches(words)
        first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
        files = [w for w in words[:first] if self._takes_files and w.endswith(".toml") and not w.startswith("-")]
        names = [w for w in words[:first] if w not in files]
        self._check_names(names, words)
        own: dict[str, Any] = {}
        others: list[str] = []
        for path, text in split_options(words[first:]):
            head, dot, rest = path.partition(".")
            name = head.replace("-", "_")
            if name in self._options:
                as_text = _is_text(self._options[name])
                set_option(own, f"{name}{dot}{rest}", text, "command line", as_text=as_text)
            else:
                self._check_setting(path)
                others.append(f"--{path}={text}")
        options, layers = self._convert(own), [read_toml(Path(f)) for f in files]
        self._check_files(layers)
        return Arguments(names, options, layers, read_overrides(others), (*others,))

    def refuse(self, words: Sequence[str], hint: str = "") -> ConfigError:
        """Make the error that says what the verb takes, and what it was given."""
        return ConfigError(f"agentrl {self.verb} takes: {self.takes}; not {' '.join(words)!r}{hint}")

    def format_help(self) -> str:
        """Format the usage, the text, the options and the settings of a run that the verb takes."""
        parts = [f"usage: agentrl {self.verb} {self.takes}".rstrip(), "", self.text]
        if self._options:
            parts += ["options [default]:", *_describe(self._options), ""]
        shown = self.settings or (lambda name: False)
        if fields := {name: field for name, field in list_settings().items() if shown(name)}:
            parts += ["settings [default]:", *_describe(fields), ""]
        return "\n".join([*parts, self.footer]).rstrip()

    @property
    def _options(self) -> dict[str, FieldInfo]:
        """Return the options by their names as typed: ``--json`` is the field ``json_``, pydantic has a ``json``."""
        return {name.rstrip("_"): field for name, field in self.options.model_fields.items()}

    @property
    def _takes_files(self) -> bool:
        return self.settings is not None and self.names[1] == 0

    @property
    def _needs_words(self) -> bool:
        return self.names[0] > 0 or any(field.is_required() for field in self._options.values())

    def _check_names(self, names: Sequence[str], words: Sequence[str]) -> None:
        fewest, most = self.names
        if most == 0 and names and not names[0].startswith("-"):
            if self.settings is not None and names[0] in list_registered("env"):
                raise ConfigError(f"unexpected argument {names[0]!r}; did you mean --env {names[0]}?")
            raise ConfigError(f"unexpected argument {names[0]!r}; agentrl {self.verb} takes: {self.takes}")
        if not fewest <= len(names) <= (len(names) if most is None else most) or any(n.startswith("-") for n in names):
            raise self.refuse(words)

    def _check_setting(self, path: str) -> None:
        """Refuse a word that is no option of the verb, unless it may be a setting of a run."""
        if self.settings is None:
            raise ConfigError(f"{path}: unknown setting{suggest(path, self._options)} [command line]")
        if path not in list_settings() and (close := get_close_matches(path, self._options, n=1, cutoff=0.8)):
            raise ConfigError(f"{path}: unknown setting; did you mean {close[0]!r}? [command line]")

    def _check_files(self, layers: Sequence[Layer]) -> None:
        """Refuse an option of the verb in a file, which holds settings of a run."""
        for source, layer in layers:
            if own := [name for name in layer if name in self._options and name not in list_settings()]:
                value = f" {layer[own[0]]}" if isinstance(layer[own[0]], (str, int, float)) else ""
                raise ConfigError(
                    f"{own[0]}: an option of agentrl {self.verb}, and no setting of a run: --{own[0]}{value} on the "
                    f"command line [{source}]"
                )

    def _complete_switches(self, words: Sequence[str]) -> list[str]:
        """Write ``--json`` out as ``--json=true``, at the end; it may also stand before the names.

        So is a word of a table, ``--vllm.enforce_eager``, that no value follows.
        """
        switches = {name for name, field in self._options.items() if field.annotation is bool}
        tables = {name for name, field in self._options.items() if get_origin(field.annotation) is dict}
        left: list[str] = []
        alone: list[str] = []
        for i, word in enumerate(words):
            following = words[i + 1] if i + 1 < len(words) else "--"
            stands_alone = following.startswith("--") or (not left and following not in ("true", "false"))
            name, dot, _ = word[2:].replace("-", "_").partition(".")
            in_table = bool(dot) and name in tables and "=" not in word and following.startswith("--")
            if word.startswith("--") and ((name in switches and not dot and stands_alone) or in_table):
                alone.append(f"{word}=true")
            else:
                left.append(word)
        return left + alone

    def _convert(self, own: Mapping[str, Any]) -> OptionsT:
        fields = {name.rstrip("_"): name for name in self.options.model_fields}
        try:
            return self.options.model_validate({fields[name]: value for name, value in own.items()})
        except pydantic.ValidationError as error:
            name, problem = list_problems(error)[0]
            name = name.rstrip("_")
            if problem == "field required":
                raise ConfigError(f"--{name} is missing: {self._options[name].description}") from None
            raise ConfigError(f"--{name}: {problem}" + (f", not {own[name]!r}" if name in own else "")) from None


def find_run_folder(name: str) -> Path:
    """Return the folder of a run. Raises UserError if it is none."""
    folder = Path(name)
    if not (folder / "config.toml").is_file():
        raise UserError(describe_missing_run(folder))
    return folder


def _is_text(field: FieldInfo) -> bool:
    """Return True for an option that takes its value as typed: 007 and 1e3 are names there."""
    union = isinstance(field.annotation, UnionType)
    kinds = set(get_args(field.annotation)) if union else {field.annotation}
    return kinds - {NoneType} <= {str, Path}


def _describe(fields: Mapping[str, FieldInfo]) -> list[str]:
    """Describe each option in a line: its name, what it is, its default."""
    width = max(map(len, fields), default=0)
    return [
        f"  --{name:<{width}}  {field.description or name.rpartition('.')[2].replace('_', ' ')}{_format_default(field)}"
        for name, field in fields.items()
    ]


def _format_default(field: FieldInfo) -> str:
    default = field.default
    if default is PydanticUndefined or default is None or default in ((), {}):
        return ""
    return f" [{str(default).lower() if isinstance(default, bool) else getattr(default, 'name', default)}]"
