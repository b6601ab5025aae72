"""Activities of servers: how many turns each is asked for, which take weights, which are lost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

from agentrl.engines.vllm.server_client import Replica
from agentrl.runtime.activity import ActivityCount, ProcessActivity


def list_servers(replicas: Sequence[Replica], requests: Sequence[int]) -> list[ProcessActivity]:
    """List what each server is at.

    Args:
        requests: turns that others ask each for, in the order of the servers.
    """
    others = chain(requests, repeat(0))
    return [
        ProcessActivity("server", replica.url, _describe(replica, replica.requests + count))
        for replica, count in zip(replicas, others, strict=False)
    ]


def _describe(replica: Replica, requests: int) -> dict[str, ActivityCount]:
    if replica.updating:
        return {"new weights": ActivityCount(1, 0.0)}
    if not replica.up:
        return {"lost": ActivityCount(1, 0.0)}
    return {"turns": ActivityCount(requests, 0.0)} if requests else {"no turn": ActivityCount(1, 0.0)}
