"""The same, as a module."""

from my_env import MyEnv

__all__ = ["MyEnv"]
