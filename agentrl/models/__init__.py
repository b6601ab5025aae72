"""Models: what they are, and what may be done with them."""
