"""Threads: conversations that requests go on with, in the tokens that were sampled."""
