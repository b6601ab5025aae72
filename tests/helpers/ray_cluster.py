"""A Ray cluster of local nodes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SIZE = {"object_store_memory": 100 << 20}


@contextmanager
def open_cluster(nodes: int, cpus: int = 2) -> Iterator[tuple[Any, list[Any]]]:
    """Start nodes beside a head that runs nothing; yield the cluster and them."""
    before, handler = os.environ.get("PYTHONPATH"), signal.getsignal(signal.SIGTERM)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster, started = _start(nodes, cpus)
    try:
        yield cluster, started
    finally:
        every = {*started, *cluster.list_all_nodes()}
        processes = [one.process for node in every for some in node.all_processes.values() for one in some]
        cluster.shutdown()
        signal.signal(signal.SIGTERM, handler)  # a node in this process ends it by its own
        for process in processes:  # Ray kills them, and warns of each that it has not waited for
            process.wait(60)
        del os.environ["RAY_USAGE_STATS_ENABLED"], os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _start(nodes: int, cpus: int, attempts: int = 4) -> tuple[Any, list[Any]]:
    """Start a cluster, again where Ray gives up a node after its own 30 seconds, as on a busy machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, include_dashboard=False, **SIZE)
        return cluster, [cluster.add_node(num_cpus=cpus, **SIZE) for _ in range(nodes)]
    except Exception:
        cluster.shutdown()
        if attempts == 1:
            raise
        return _start(nodes, cpus, attempts - 1)
