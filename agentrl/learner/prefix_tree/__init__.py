"""Prefix trees: tokens that several rows share are computed once."""
