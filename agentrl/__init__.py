"""agentrl: train language models that use tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentrl.env import Env, EnvSpec, ToolEnv
from agentrl.errors import ContractError, ToolError, UserError, WorldFault
from agentrl.reward_model import RewardModel
from agentrl.tool import Tool, tool
from agentrl.toolset import Toolset
from agentrl.types import Message, Reply, Step, Trajectory

if TYPE_CHECKING:
    from agentrl.evaluation import evaluate
    from agentrl.training import train

__version__ = "0.1.0"
__all__ = [
    "ContractError",
    "Env",
    "EnvSpec",
    "Message",
    "Reply",
    "RewardModel",
    "Step",
    "Tool",
    "ToolEnv",
    "ToolError",
    "Toolset",
    "Trajectory",
    "UserError",
    "WorldFault",
    "evaluate",
    "tool",
    "train",
]


def __getattr__(name: str) -> Any:
    """``train`` and ``evaluate`` come when asked for: they bring torch with them."""
    if name == "train":
        from agentrl.training import train

        return train
    if name == "evaluate":
        from agentrl.evaluation import evaluate

        return evaluate
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
