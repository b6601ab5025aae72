"""Rewards: functions from episodes to numbers."""
