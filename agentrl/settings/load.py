"""The section `load`: settings of how a model is loaded, and the types that its weights may have."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.settings.section import Section

DType = Literal["float32", "bfloat16", "auto"]


class LoadConfig(Section):
    """Settings of loading the model."""

    revision: str | None = Field(None, min_length=1, description="of a model of the hub: a branch, a tag or a commit")
    attn_implementation: str | None = Field(
        None,
        min_length=1,
        description="sdpa, eager, flash_attention_2 ...: of the model's own passes; where agentrl shares prefixes, and "
        "in the embedded engine, its own attention runs",
    )
    trust_remote_code: bool = Field(
        False, description="run the code that a model brings with it; only what you trust: it may do anything you may"
    )
