"""Rollouts: episodes, groups and batches of them, sampled from an engine."""
