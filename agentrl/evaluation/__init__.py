"""Evaluations: what a policy earns on tasks, with intervals, and how two policies compare."""
