"""Engines: they sample from the policy, each behind the protocol of ``agentrl.rollout.engine_protocol``."""
