"""Play an episode by hand: an engine that a person is."""
