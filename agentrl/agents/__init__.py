"""Agents of others: programs that play an episode by themselves, through an endpoint that is the policy."""
