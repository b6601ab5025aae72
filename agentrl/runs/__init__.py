"""Run folders: writing them, reading them back, scoring their episodes again, replaying them."""
