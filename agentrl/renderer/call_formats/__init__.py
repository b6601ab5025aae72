"""Call formats: how a model family writes a tool call."""
