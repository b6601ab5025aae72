"""The settings of a run: their schema, where they are read from, and what is registered by name."""
