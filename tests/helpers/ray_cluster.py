"""A Ray cluster of local nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@contextmanager
def open_cluster(nodes: int, cpus: int = 2) -> Iterator[tuple[Any, list[Any]]]:
    """Start nodes beside a head that runs nothing; yield the cluster and them."""
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    size = {"object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **size})
    started = [cluster.add_node(num_cpus=cpus, **size) for _ in range(nodes)]
    try:
        yield cluster, started
    finally:
        every = {*started, *cluster.list_all_nodes()}
        processes = [one.process for node in every for some in node.all_processes.values() for one in some]
        cluster.shutdown()
        for process in processes:  # Ray kills them, and warns of each that it has not waited for
            process.wait(60)
        del os.environ["RAY_USAGE_STATS_ENABLED"], os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
