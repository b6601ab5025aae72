"""Does an environment, or a tool, keep its contract? Plain functions that return findings; nothing is printed."""

from __future__ import annotations

from agentrl.inspection.env import check_env
from agentrl.inspection.finding import Finding, failures
from agentrl.inspection.tool import check_tool

__all__ = ["Finding", "check_env", "check_tool", "failures"]
