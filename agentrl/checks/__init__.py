"""Checks of environments, tools and agents: plain functions that return findings; nothing is printed."""

from __future__ import annotations

from agentrl.checks.agent import check_agent
from agentrl.checks.env import check_env
from agentrl.checks.finding import Finding, failures
from agentrl.checks.tool import check_tool

__all__ = ["Finding", "check_agent", "check_env", "check_tool", "failures"]
