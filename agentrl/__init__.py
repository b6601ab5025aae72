"""agentrl: train language models that use tools."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from agentrl.env import Env, EnvSpec, ToolEnv
from agentrl.errors import ContractError, ToolError, UserError, WorldFault
from agentrl.tool import Tool, tool
from agentrl.types import Message, Reply, Step, Trajectory

if TYPE_CHECKING:
    from agentrl.evaluate import evaluate
    from agentrl.train import train

__version__ = "0.1.0"
__all__ = [
    "ContractError",
    "Env",
    "EnvSpec",
    "Message",
    "Reply",
    "Step",
    "Tool",
    "ToolEnv",
    "ToolError",
    "Trajectory",
    "UserError",
    "WorldFault",
    "evaluate",
    "tool",
    "train",
]


class _Package(ModuleType):
    """Keeps ``agentrl.train`` the function: importing the module of that name would put it in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in ("train", "evaluate") and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """``train`` and ``evaluate`` come when asked for: they bring torch with them."""
    if name == "train":
        from agentrl.train import train

        return train
    if name == "evaluate":
        from agentrl.evaluate import evaluate

        return evaluate
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
