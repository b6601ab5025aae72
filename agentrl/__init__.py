"""agentrl: train language models that use tools."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agentrl.env import Env, EnvSpec, ToolEnv
from agentrl.errors import ContractError, ToolError, UserError, WorldFault
from agentrl.reward_model import RewardModel
from agentrl.tool import Tool, tool
from agentrl.toolset import Toolset
from agentrl.types import Message, Reply, Step, Trajectory

if TYPE_CHECKING:
    from agentrl.comparison import compare
    from agentrl.evaluation import evaluate
    from agentrl.gym.bridge import as_gymnasium, register_gymnasium
    from agentrl.gym.world import from_gymnasium
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
    "as_gymnasium",
    "compare",
    "evaluate",
    "from_gymnasium",
    "register_gymnasium",
    "tool",
    "train",
]


_LAZY = {  # they bring torch with them, or gymnasium
    "train": "agentrl.training",
    "evaluate": "agentrl.evaluation",
    "compare": "agentrl.comparison",
    "as_gymnasium": "agentrl.gym.bridge",
    "register_gymnasium": "agentrl.gym.bridge",
    "from_gymnasium": "agentrl.gym.world",
}


def __getattr__(name: str) -> Any:
    """What comes when it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "gymnasium":
            raise
        raise UserError(f"agentrl.{name} needs the package gymnasium: pip install 'agentrl-gym[gym]'") from None
