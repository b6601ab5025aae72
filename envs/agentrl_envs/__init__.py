"""The environments that come with agentrl."""
