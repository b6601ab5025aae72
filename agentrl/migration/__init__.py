"""From TRL: a script or a configuration file, read without being run, as a configuration of agentrl's."""
