"""Environments: where a policy acts, task by task."""
