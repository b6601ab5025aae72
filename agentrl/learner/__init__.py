"""From groups to a better policy: advantages, packing, logprobs, loss, update."""
