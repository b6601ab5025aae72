"""A service that plays episodes: each task is posted to it, and its answer ends the episode."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import httpx2

from agentrl.agents.agent import AgentEnding, AgentTask
from agentrl.agents.proxies import is_loopback


class ServiceAgent:
    """An agent at a URL. A status from 400 on is the agent's error; no answer at all is the world's fault."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http: httpx2.AsyncClient | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        limits, proxies = httpx2.Limits(max_connections=None), not is_loopback(self.url)
        async with httpx2.AsyncClient(timeout=None, limits=limits, trust_env=proxies) as self._http:
            yield self

    async def run(self, task: AgentTask) -> AgentEnding:
        assert self._http is not None  # open
        try:
            response = await self._http.post(self.url, json=task.to_json())
        except httpx2.HTTPError as error:
            return AgentEnding(f"{self.url} does not answer: {type(error).__name__}", str(error), killed=True)
        if response.is_success:
            return AgentEnding()
        return AgentEnding(f"{self.url} answered {response.status_code}", response.text[:4000])
