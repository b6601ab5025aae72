"""Training: the loop, its step, its checkpoints and callbacks."""
