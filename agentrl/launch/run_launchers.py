"""Launchers of runs: what finds places for ranks and servers, and starts them there.

A launcher is given a `RunPlan`, and what takes a sentence; it returns an async context manager of a `Placement`. It is
declared with `agentrl.settings.entries.run_launcher`: ``module:function``, ``file.py:function``, or an entry point of
the group ``agentrl.run_launchers``. It ends what still runs when the block ends.
"""

from __future__ import annotations

from agentrl.launch.run_process import RunPlan, Say
from agentrl.settings.entries import run_launcher


@run_launcher(explain="processes of this machine")
def local(plan: RunPlan, say: Say) -> object:
    """Run ranks and servers as processes of this machine; of its GPUs each has its own."""
    from agentrl.launch.local_processes import place_locally

    return place_locally(plan)


@run_launcher(explain="tasks of an existing Ray cluster, placed by their resources; players too")
def ray(plan: RunPlan, say: Say) -> object:
    """Run ranks, servers and players as tasks of an existing Ray cluster, which places them by their resources."""
    from agentrl.launch.ray_processes import place_on_ray  # of which nothing else here has need

    return place_on_ray(plan, say)
