"""A model that brings its class with it, as code in its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from agentrl.models.source import locate_model

_CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM

class OwnConfig(Qwen3Config):
    model_type = "own"

class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


def write_own_model(folder: Path) -> str:
    """Write nano as a model of its own class; return the folder."""
    shutil.copytree(locate_model("nano"), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(_CODE)
    return str(folder)
