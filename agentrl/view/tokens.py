"""What tokens say: the tokenizer of a run, found beside its model; read when first needed, without transformers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.evaluation_scope import read_scope
from agentrl.view.store import Store

CONTEXT = 4  # tokens before the first, so that its leading space is seen


class Texts:
    """Texts by token ids; where there is no tokenizer, ``why`` says so, and the texts are the ids."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._found: Any = None
        self.why = ""

    def _tokenizer(self) -> Any:
        with self._lock:
            if self._found is None and not (self.why and self._store.ended):
                self._found, self.why = _load(self._store)
            return self._found

    def of(self, ids: Sequence[int]) -> list[str]:
        """A text each. Bytes of one character in several tokens are shown with the last of them."""
        tokenizer = self._tokenizer()
        if tokenizer is None:
            return [f"‹{i}›" for i in ids]
        found, start, shown = [], 0, ""
        for end in range(1, len(ids) + 1):
            whole = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
            if whole.endswith("\ufffd") and end - start < 8 and end < len(ids):  # the middle of a character
                found.append("")
                continue
            new = whole[len(shown) :] if whole.startswith(shown) else whole
            found.append(new)
            if end - start >= CONTEXT:
                start = end - 1
                shown = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
            else:
                shown = whole
        return found


class _Bytes:
    """Reads the tokens of an endpoint's conversations, which are bytes."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", "replace")


def _load(store: Store) -> tuple[Any, str]:
    from tokenizers import Tokenizer

    scope = read_scope(store.folder)
    if scope is not None and scope.endpoint:
        return _Bytes(), ""
    path = _path(store)
    if path is None:
        return None, "no tokenizer.json beside the run's model: tokens are shown as their ids"
    try:
        return Tokenizer.from_file(str(path)), ""
    except Exception as error:  # the tokenizers package raises plain Exception
        return None, f"{path} cannot be read ({error}): tokens are shown as their ids"


def _path(store: Store) -> Path | None:
    """In the run's own model, where it is saved; before that in the one it began from. Nothing is downloaded."""
    own = store.folder / "model" / "tokenizer.json"
    name = store.setting("model")
    if own.is_file() or not isinstance(name, str):
        return own if own.is_file() else None
    from agentrl.policy import locate

    try:
        folder = Path(locate(name))
    except UserError:
        return None
    if (folder / "tokenizer.json").is_file():
        return folder / "tokenizer.json"
    return _cached(name)


def _cached(name: str) -> Path | None:
    """From the cache of the model hub."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "tokenizer.json")
    except (ImportError, ValueError):
        return None
    return Path(found) if isinstance(found, str) else None
