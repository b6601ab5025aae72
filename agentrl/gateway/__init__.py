"""The gateway: an endpoint before the run's engine, by which agents of others play episodes."""
