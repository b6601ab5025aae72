"""Advantages: how much better than its group an episode, or a turn, was."""
