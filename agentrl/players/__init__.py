"""Players: rollouts in any number of processes and machines; a controller leases groups to them, each exactly once."""
