"""What samples from the policy. Each module is one engine behind the contract of ``agentrl.engine``."""
