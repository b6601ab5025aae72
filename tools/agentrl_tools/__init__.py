"""Built-in tools. Each module is one tool, registered as a plugin would be."""
