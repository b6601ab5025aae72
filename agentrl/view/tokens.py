"""The texts of tokens, by the tokenizer beside a run's model: read when first needed, without transformers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.evaluation.scope import read_scope
from agentrl.view.store import Store

CONTEXT = 4  # tokens before the first, so that its leading space is seen


class TokenTexts:
    """A decoder of a run's tokens. If there is no tokenizer, ``why`` says so, and the texts are the ids."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._decoder: Any = None
        self.why = ""

    def _tokenizer(self) -> Any:
        with self._lock:
            if self._decoder is None and not (self.why and self._store.ended):
                self._decoder, self.why = _load_decoder(self._store)
            return self._decoder

    def decode(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. A character of several tokens is with the last of them."""
        tokenizer = self._tokenizer()
        if tokenizer is None:
            return [f"‹{i}›" for i in ids]
        texts, start, shown = [], 0, ""
        for end in range(1, len(ids) + 1):
            whole = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
            if whole.endswith("\ufffd") and end - start < 8 and end < len(ids):  # the middle of a character
                texts.append("")
                continue
            new = whole[len(shown) :] if whole.startswith(shown) else whole
            texts.append(new)
            if end - start >= CONTEXT:
                start = end - 1
                shown = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
            else:
                shown = whole
        return texts


class _Bytes:
    """A decoder for the conversations of an endpoint, whose tokens are bytes."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", "replace")


def _load_decoder(store: Store) -> tuple[Any, str]:
    from tokenizers import Tokenizer

    scope = read_scope(store.folder)
    if scope is not None and scope.endpoint:
        return _Bytes(), ""
    path = _find_tokenizer(store)
    if path is None:
        return None, "no tokenizer.json beside the run's model: tokens are shown as their ids"
    try:
        return Tokenizer.from_file(str(path)), ""
    except Exception as error:  # the tokenizers package raises plain Exception
        return None, f"{path} cannot be read ({error}): tokens are shown as their ids"


def _find_tokenizer(store: Store) -> Path | None:
    """Return the path of the run's tokenizer: its own if it is saved, else its first model's. Download nothing."""
    own = store.folder / "model" / "tokenizer.json"
    name = store.setting("model")
    if own.is_file() or not isinstance(name, str):
        return own if own.is_file() else None

    from agentrl.models.source import locate_model

    try:
        folder = Path(locate_model(name))
    except UserError:
        return None
    if (folder / "tokenizer.json").is_file():
        return folder / "tokenizer.json"
    return _find_cached(name, store.setting("load.revision"))


def _find_cached(name: str, revision: object) -> Path | None:
    """Return the tokenizer in the cache of the model hub."""
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(name, "tokenizer.json", revision=revision if isinstance(revision, str) else None)
    except (ImportError, ValueError):
        return None
    return Path(path) if isinstance(path, str) else None
