"""The rows of a prompts dataset by split, and what the columns of a row mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any

from agentrl import ContractError, UserError
from agentrl.errors import suggest
from agentrl.types import Message
from agentrl_envs.dataset import DataSource, Reader, Row
from agentrl_envs.row_stream import RowStream

TEST_ROWS = 256  # held out at most, where nothing else is said
SHUFFLE_BUFFER = 1000
_ROLES = ("system", "user", "assistant", "tool")
_IMAGES = ("image", "images")


@dataclass(frozen=True)
class PromptColumns:
    """The columns that a dataset calls by names of its own. ``reward_model.ground_truth`` is a column in a column."""

    prompt: str = "prompt"
    solution: str | None = None

    def split(self, row: Mapping[str, Any], where: str) -> tuple[str | list[Message], Row]:
        """Return a row's prompt, and the columns that reward functions are given.

        The last message of a column ``messages`` (a chat, as for supervised training), where it is the assistant's, is
        no part of the prompt; it is the column ``completion``.

        Raises:
            UserError: it has no prompt that can be trained on; the sentence begins with ``where``.
        """
        prompt, columns = read_column(row, self.prompt), {k: v for k, v in row.items() if k != self.prompt}
        if self.solution is not None:
            columns["solution"] = read_column(row, self.solution)
        for name in _IMAGES:
            if columns.get(name) is not None:
                raise UserError(f"{where} has an {name!r}: agentrl trains on text; leave the column out of the data")
        if isinstance(prompt, str):
            return prompt, columns
        messages = self._read_messages(prompt, where)
        if messages[-1]["role"] == "assistant" and self.prompt.endswith("messages") and len(messages) > 1:
            columns.setdefault("completion", [messages.pop()])
        if messages[-1]["role"] == "assistant":
            raise UserError(
                f"{where}: {self.prompt!r} ends with a message of the assistant's, whose turn it would be; end it with "
                "the user's"
            )
        return messages, columns

    def _read_messages(self, prompt: object, where: str) -> list[Message]:
        good = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
        if not good or not prompt:
            raise UserError(f"{where}: {self.prompt!r} must be a string or a list of messages, not {prompt!r:.80}")
        return [self._read_message(m, where) for m in prompt]  # type: ignore[attr-defined]

    def _read_message(self, message: Row, where: str) -> Message:
        """Return a message without the keys that a table fills with None."""
        if message["role"] not in _ROLES:
            raise UserError(f"{where}: a message's role is one of {', '.join(_ROLES)}; not {message['role']!r:.40}")
        filled: Any = {k: v for k, v in message.items() if v is not None}
        filled["content"] = self._read_content(message["content"], where)
        return filled  # type: ignore[no-any-return]

    def _read_content(self, content: object, where: str) -> str:
        if content is None:
            return ""  # of a message that calls tools
        if isinstance(content, str):
            return content
        parts = content if isinstance(content, list) and all(isinstance(p, dict) for p in content) else None
        if parts is None or any(p.get("type") != "text" or not isinstance(p.get("text"), str) for p in parts):
            kind = next((p.get("type") for p in parts or () if p.get("type") != "text"), None)
            why = f"a part of the type {kind!r}; agentrl trains on text" if kind else f"{content!r:.80}"
            raise UserError(f"{where}: the content of a message is a text, or a list of parts of text; not {why}")
        return "".join(p["text"] for p in parts)

    def check(self, rows: Sequence[Row], name: str) -> Sequence[Row]:
        """Return rows. Raises UserError if there are none, or one of them has no prompt; a dataset's others later."""
        if not len(rows):
            raise UserError(f"{name} has no rows")
        first = rows[0]
        if not isinstance(first, Mapping):
            raise UserError(f"{name}: a row is a dict with a {self.prompt!r}, not {first!r:.80}")
        for column, option in ((self.prompt, "prompt_column"), (self.solution, "solution_column")):
            if column is not None and read_column(first, column, _MISSING) is _MISSING:
                raise UserError(f"{name} has no column {column!r}{suggest(column, first)} (--env.{option} NAME)")
        for number in range(len(rows)) if isinstance(rows, list) else (0,):
            self.split(rows[number], f"row {number + 1}")
        return rows


_MISSING = object()


def read_column(row: Mapping[str, Any], name: str, default: object = None) -> Any:
    """Return a column, or one inside a column by a name with dots; the default where there is none."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


@dataclass
class PromptRows:
    """The rows of a run: to train on, and held out, by the name of the split."""

    train: Sequence[Row] | Reader
    held_out: Mapping[str, Sequence[Row]]
    shuffle_buffer: int = 0
    streams: dict[int, RowStream] = field(default_factory=dict)  # by the seed of the run

    def count(self, split: str) -> int | None:
        """Return how many rows a split has; None for a stream."""
        rows = self._split(split)
        return None if callable(rows) else len(rows)

    async def row(self, split: str, task: int) -> Row:
        """Return the row of a task. In a stream, run ``seed`` has the tasks from ``seed * 2**32`` on."""
        rows = self._split(split)
        if not callable(rows):
            return rows[task % len(rows)]
        seed, number = divmod(task, 2**32)
        if seed not in self.streams:
            self.streams[seed] = RowStream(rows, self.shuffle_buffer, seed)
        return await self.streams[seed].row(number)

    async def close(self) -> None:
        for stream in self.streams.values():
            await stream.close()

    def _split(self, split: str) -> Sequence[Row] | Reader:
        if split != "train" and split not in self.held_out:
            raise UserError(f"env 'prompts' has no split {split!r}{suggest(split, ['train', *self.held_out])}")
        return self.train if split == "train" else self.held_out[split]


def name_test_splits(test_data: object) -> Sequence[str]:
    """List the held-out splits that ``test_data`` makes."""
    if not isinstance(test_data, Mapping) or "data" in test_data:
        return ("test",)
    return tuple(dict.fromkeys(("test", *map(str, test_data))))


def load_prompt_rows(settings: Mapping[str, Any], columns: PromptColumns) -> PromptRows:
    """Load the rows that an environment's settings name, all or as a stream, and hold some out.

    Raises:
        UserError: data is missing or wrong, or a setting does nothing.
    """
    named: dict[str, Any] = {name: settings.get(name) for name in ("split", "revision", "data_files")}
    source, test_data = DataSource(settings["data"], **named), settings.get("test_data")
    test_split, test_rows = settings.get("test_split"), settings.get("test_rows")
    buffer = settings.get("shuffle_buffer")
    for name, number, least in (("test_rows", test_rows, 1), ("shuffle_buffer", buffer, 0)):
        if number is not None and number < least:
            raise ContractError(f"env.{name} is {least} or more, not {number}")
    streams = bool(settings.get("streaming")) or source.is_stream()
    if buffer is not None and not streams:
        raise ContractError("env.shuffle_buffer is for a stream (env.streaming); other data is shuffled whole")
    if test_data is not None and test_split is not None:
        raise ContractError("env.test_data and env.test_split say the same twice")
    if test_split is not None:
        test_data = DataSource(settings["data"], **{**named, "split": test_split}, name="env.test_split")
    buffer = SHUFFLE_BUFFER if buffer is None else buffer
    if not streams:
        rows = columns.check(source.load(), _describe(source.data))
        return _with_held_out(rows, test_data, test_rows, columns)
    read = _CheckedReader(source.stream(), columns)
    if test_data is not None:
        return PromptRows(read, _load_tests(test_data, test_rows, columns), buffer)
    return _split_stream(read, TEST_ROWS if test_rows is None else test_rows, columns, buffer)


def _with_held_out(rows: Sequence[Row], test_data: Any, test_rows: int | None, columns: PromptColumns) -> PromptRows:
    if test_data is not None:
        return PromptRows(rows, _load_tests(test_data, test_rows, columns))
    if len(rows) < 2:
        raise UserError(f"env.data has {len(rows)} row; two are the least, one of which is held out")
    if test_rows is not None and test_rows >= len(rows):
        raise UserError(f"env.test_rows {test_rows} holds out all {len(rows)} rows of env.data")
    parts = hold_out_rows(rows, columns.prompt, test_rows)
    return PromptRows(parts["train"], {"test": parts["test"]})


def _split_stream(read: Reader, test_rows: int, columns: PromptColumns, buffer: int) -> PromptRows:
    """Hold out the first rows of a stream, and train on those after them that ask something else."""
    first = list(islice(read(), test_rows + 1))
    if len(first) <= test_rows:  # a short one: it is all here
        columns.check(first, "the stream of env.data")
        return _with_held_out(first, None, None, columns)
    columns.check(first, "the stream of env.data")
    held = first[:test_rows]
    asked = {_question(read_column(row, columns.prompt)) for row in held}
    rest = _Rest(read, test_rows, asked, columns.prompt)
    return PromptRows(rest, {"test": held}, buffer)


def _load_tests(test_data: Any, test_rows: int | None, columns: PromptColumns) -> dict[str, Sequence[Row]]:
    """Load the held-out rows: of one dataset, or of several by their names, which are ``test`` together."""
    if not isinstance(test_data, Mapping) or "data" in test_data:
        return {"test": _load_test(_as_source(test_data, "env.test_data"), test_rows, columns)}
    if not test_data or "train" in test_data:
        raise ContractError(f"env.test_data is a dataset, or a dict of them by names but train; not {test_data!r:.80}")
    named = {
        str(name): _load_test(_as_source(data, f"env.test_data.{name}"), test_rows, columns)
        for name, data in test_data.items()
    }
    return named if "test" in named else {"test": _Joined(list(named.values())), **named}


def _as_source(data: Any, name: str) -> DataSource:
    """Return the source that a setting gives: a dataset, or a table with ``data``, ``split`` and so on."""
    if isinstance(data, DataSource):
        return data
    if not isinstance(data, Mapping) or "data" not in data:
        return DataSource(data, name=name)
    known = ("data", "split", "revision", "data_files")
    for key in data:
        if key not in known:
            raise ContractError(f"{name} has no setting {key!r}{suggest(str(key), known)}")
    return DataSource(**data, name=name)


def _load_test(source: DataSource, test_rows: int | None, columns: PromptColumns) -> Sequence[Row]:
    if source.is_stream():
        rows: Sequence[Row] = list(islice(source.stream("test")(), test_rows or TEST_ROWS))
    elif test_rows is not None:
        raise ContractError(f"env.test_rows is for a stream, or rows of env.data; {source.name} is held out whole")
    else:
        rows = source.load("test")
    return columns.check(rows, _describe(source.data))


def _describe(data: object) -> str:
    return f"dataset {data!r:.80}"


@dataclass(frozen=True)
class _CheckedReader:
    """Reads a stream, and refuses what is no row in it, by its number."""

    read: Reader
    columns: PromptColumns

    def __call__(self) -> Iterator[Row]:
        for number, row in enumerate(self.read(), 1):
            if not isinstance(row, Mapping):
                raise UserError(f"row {number} of the stream is no dict with a {self.columns.prompt!r}: {row!r:.80}")
            self.columns.split(row, f"row {number} of the stream")
            yield dict(row)


@dataclass(frozen=True)
class _Rest:
    """Reads a stream from behind its held-out rows on, without others that ask the same."""

    read: Reader
    held: int
    asked: set[bytes]
    column: str

    def __call__(self) -> Iterator[Row]:
        rows = islice(self.read(), self.held, None)
        return (row for row in rows if _question(read_column(row, self.column)) not in self.asked)


@dataclass(frozen=True)
class _Joined(Sequence[Row]):
    """Several sequences of rows, one after the other, without copying them."""

    parts: Sequence[Sequence[Row]]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: Any) -> Any:
        for part in self.parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(index)


@dataclass(frozen=True)
class _Some(Sequence[Row]):
    """A selection of a sequence of rows, without copying them."""

    rows: Sequence[Row]
    places: Sequence[int]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[self.places[index]]


def hold_out_rows(rows: Sequence[Row], column: str, most: int | None = None) -> dict[str, Sequence[Row]]:
    """Split rows: hold out the last tenth, 256 at most, or the last ``most``, all copies of a prompt on one side.

    Going backwards, a prompt is held out where all its rows still fit. Where none does, it is the rarest one. Where all
    rows ask the same, it is the last tenth after all.
    """
    room = min(TEST_ROWS, max(1, len(rows) // 10)) if most is None else most
    places: dict[bytes, list[int]] = {}
    whole = hasattr(rows, "column_names") and column in rows.column_names
    prompts: Any = rows[column] if whole else (read_column(row, column) for row in rows)  # type: ignore[call-overload]
    for place, prompt in enumerate(prompts):
        places.setdefault(_question(prompt), []).append(place)
    held: set[int] = set()
    for copies in sorted(places.values(), key=lambda copies: -copies[-1]):
        if len(held) + len(copies) <= room:
            held.update(copies)
    if not held and len(places) > 1:
        rarest: list[int] = min(places.values(), key=len)
        held.update(rarest)
    held = held or set(range(len(rows) - room, len(rows)))
    return {
        "train": _Some(rows, [place for place in range(len(rows)) if place not in held]),
        "test": _Some(rows, sorted(held)),
    }


def _question(prompt: Any) -> bytes:
    """Compute a digest of what a prompt says, whatever its white space."""
    said = [prompt] if isinstance(prompt, str) else [f"{m['role']}: {m['content']}" for m in prompt or ()]
    return blake2b(
        "\n".join(" ".join(str(text).split()) for text in said).encode("utf-8", "replace"), digest_size=12
    ).digest()
