"""Programs for the venv of a verifiers package: they import verifiers, and nothing of agentrl."""
