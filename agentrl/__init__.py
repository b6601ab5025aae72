"""agentrl: train language models that use tools."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agentrl.credit import assign_credit
from agentrl.environments.agent_env import AgentEnv
from agentrl.environments.env import Env, ToolEnv
from agentrl.environments.spec import EnvSpec
from agentrl.errors import ContractError, InfraError, ToolError, UserError
from agentrl.rewards.reward_model import RewardModel
from agentrl.settings.entries import (
    Metric,
    advantage,
    call_format,
    engine,
    importance_sampling,
    loss,
    optimizer,
    sampler,
)
from agentrl.settings.secret import Secret
from agentrl.tools.tool import Tool, tool
from agentrl.tools.toolset import Toolset
from agentrl.training.callbacks import Callback
from agentrl.types import Message, Reply, Step, ToolCall, Trajectory

if TYPE_CHECKING:
    from agentrl.environments.gymnasium.from_gymnasium import from_gymnasium
    from agentrl.environments.gymnasium.to_gymnasium import as_gymnasium, register_gymnasium
    from agentrl.evaluation.comparison import compare
    from agentrl.evaluation.evaluate import evaluate
    from agentrl.learner.learner import Learner, LossSettings
    from agentrl.learner.optimizers import make_optimizers
    from agentrl.library.rollouts import open_rollouts
    from agentrl.library.run import Run
    from agentrl.library.sft import sft
    from agentrl.library.train import train

__version__ = "0.1.0"
__all__ = [
    "AgentEnv",
    "Callback",
    "ContractError",
    "Env",
    "EnvSpec",
    "InfraError",
    "Learner",
    "LossSettings",
    "Message",
    "Metric",
    "Reply",
    "RewardModel",
    "Run",
    "Secret",
    "Step",
    "Tool",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "Toolset",
    "Trajectory",
    "UserError",
    "advantage",
    "as_gymnasium",
    "assign_credit",
    "call_format",
    "compare",
    "engine",
    "evaluate",
    "from_gymnasium",
    "importance_sampling",
    "loss",
    "make_optimizers",
    "open_rollouts",
    "optimizer",
    "register_gymnasium",
    "sampler",
    "sft",
    "tool",
    "train",
]


_LAZY = {  # they bring torch with them, or gymnasium
    "Run": "agentrl.library.run",
    "Learner": "agentrl.learner.learner",
    "LossSettings": "agentrl.learner.learner",
    "make_optimizers": "agentrl.learner.optimizers",
    "open_rollouts": "agentrl.library.rollouts",
    "sft": "agentrl.library.sft",
    "train": "agentrl.library.train",
    "evaluate": "agentrl.evaluation.evaluate",
    "compare": "agentrl.evaluation.comparison",
    "as_gymnasium": "agentrl.environments.gymnasium.to_gymnasium",
    "register_gymnasium": "agentrl.environments.gymnasium.to_gymnasium",
    "from_gymnasium": "agentrl.environments.gymnasium.from_gymnasium",
}


def __getattr__(name: str) -> Any:
    """Import a name that brings torch or gymnasium with it when it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "gymnasium":
            raise
        raise UserError(f"agentrl.{name} needs the package gymnasium: pip install 'agentrl-gym[gym]'") from None
