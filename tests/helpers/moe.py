"""nano as a mixture of experts: each layer's MLP several times, a little changed, behind a random router."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from agentrl.models.source import locate_model

EXPERTS, TOP_K, LAYERS = 8, 2, 5


def write_moe(folder: Path) -> Path:
    """Write the model and its tokenizer, in float32; return the folder."""
    shutil.copytree(locate_model("nano"), folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    wide = config["intermediate_size"]
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "float32",
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": wide,
        "norm_topk_prob": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator, weights = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensor = tensor.float()
        if ".mlp." not in name:
            weights[name] = tensor
            continue
        before, _, kind = name.partition(".mlp.")
        for expert in range(EXPERTS):
            noise = torch.randn(tensor.shape, generator=generator) * 0.1 * tensor.std()
            weights[f"{before}.mlp.experts.{expert}.{kind}"] = tensor + noise
        if kind == "gate_proj.weight":
            gate = torch.randn(EXPERTS, config["hidden_size"], generator=generator)
            weights[f"{before}.mlp.gate.weight"] = 0.3 * gate
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
