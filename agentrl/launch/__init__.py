"""A whole run by one command: the learner's ranks and the vLLM servers, on this machine or on a cluster."""
