"""agentrl as a library: `train` and its `Run`, progress in a script and in a notebook, the parts of a loop."""
