"""Bridges to Gymnasium: its environments as ours, and ours as its."""
